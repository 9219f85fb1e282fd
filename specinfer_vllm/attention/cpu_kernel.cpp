// SPDX-License-Identifier: Apache-2.0
// Tree attention over the paged KV cache of vLLM's CPU backend, float32, `vec` packing.
//
// In    query      [rows, heads, head_dim]                    row stride given, heads contiguous
//       cache      [blocks, kv_heads, 2 * block * head_dim]   keys [head_dim, block], then values [block, head_dim]
//       table      [requests, table_stride] int32             physical blocks of each request
//       rows       [requests, width] int64                    query row of each tree row, negative at padding
//       prefix     [requests] int64                           committed tokens, all visible
//       tree_len   [requests] int64                           tree slots behind the prefix
//       ancestors  [requests, width, words] uint64            bit j: tree slot j (sequence index prefix + j) is visible
//       position   [requests, width] int64                    of the row; prefix + depth
//       depth      [requests, tree] int64                     of the node at each tree slot; the window is measured by it
// Out   output     [rows, heads, head_dim]                    tree rows only; others are left alone
// Work  partial    [requests, kv_heads, splits, group * width, head_dim + 2] float32
// Undefined: block table entries past a request's last block and cache contents past its last tree slot; neither gets into
// a result (scores there are replaced, values there are not multiplied at all).
//
// One pass over prefix and tree with split-KV: a task is (request, KV head, split); the group of query heads that shares a
// KV head is packed into one tile, so every K/V block is read once per KV head. A second stage merges the splits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 8;  // floats per vector; the compiler lowers them to what the machine has
constexpr int TILE_ROWS = 4;
constexpr int TILE_COLS = 2 * LANES;
constexpr int ROWS_AT_ONCE = 64;  // scores of so many rows stay in the first-level cache
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));

inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x}; }

// exp for x <= 0, 2 ulp: 2^n * p(r), Cephes coefficients; below -87 the result is 0.
inline Vec exp_of(Vec x) {
  const Vec low = broadcast(-87.0f);
  const IntVec underflow = x < low;
  x = x > low ? x : low;
  const Vec n = __builtin_convertvector(__builtin_convertvector(x * 1.44269504f - 0.5f, IntVec), Vec);
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  p = p * (Vec)power;
  return underflow ? broadcast(0.0f) : p;
}

// c[rows][cols] (+)= a[rows][depth] * b[depth][cols]; lda, ldb, ldc are the distances between rows.
template <bool ADD, int ROWS>
inline void multiply_tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth) {
  Vec low[ROWS], high[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    low[r] = ADD ? *reinterpret_cast<const Vec*>(c + r * ldc) : broadcast(0.0f);
    high[r] = ADD ? *reinterpret_cast<const Vec*>(c + r * ldc + LANES) : broadcast(0.0f);
  }
  for (int d = 0; d < depth; ++d) {
    const Vec b0 = *reinterpret_cast<const Vec*>(b + static_cast<int64_t>(d) * ldb);
    const Vec b1 = *reinterpret_cast<const Vec*>(b + static_cast<int64_t>(d) * ldb + LANES);
    for (int r = 0; r < ROWS; ++r) {
      const float x = a[r * lda + d];
      low[r] += x * b0;
      high[r] += x * b1;
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    *reinterpret_cast<Vec*>(c + r * ldc) = low[r];
    *reinterpret_cast<Vec*>(c + r * ldc + LANES) = high[r];
  }
}

// cols is a multiple of TILE_COLS.
template <bool ADD>
void multiply(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int rows, int cols, int depth) {
  for (int col = 0; col < cols; col += TILE_COLS) {
    int row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
      multiply_tile<ADD, TILE_ROWS>(a + row * lda, lda, b + col, ldb, c + row * ldc + col, ldc, depth);
    for (; row < rows; ++row) multiply_tile<ADD, 1>(a + row * lda, lda, b + col, ldb, c + row * ldc + col, ldc, depth);
  }
}

inline float horizontal_max(Vec v) {
  float best = v[0];
  for (int i = 1; i < LANES; ++i) best = std::max(best, v[i]);
  return best;
}

inline float horizontal_sum(Vec v) {
  float sum = 0.0f;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}

struct Problem {
  const float* query;
  float* output;
  const float* cache;
  const int32_t* table;
  const int64_t* rows;
  const int64_t* prefix;
  const int64_t* tree_len;
  const uint64_t* ancestors;
  const int64_t* position;
  const int64_t* depth;
  float* partial;
  int64_t requests, width, tree, words, heads, kv_heads, head_dim, block, table_stride, query_stride, output_stride, splits;
  int64_t window;
  float scale, soft_cap;

  int64_t group() const { return heads / kv_heads; }
  int64_t tile() const { return group() * width; }
  int64_t keys(int64_t request) const { return prefix[request] + tree_len[request]; }
  float* partial_of(int64_t request, int64_t head, int64_t split) const {
    return partial + (((request * kv_heads + head) * splits + split) * tile()) * (head_dim + 2);
  }
};

// Hide what the tree row must not see among keys [first, first + count) of its request.
void hide(const Problem& p, int64_t request, int64_t node, int64_t first, int64_t count, float* scores) {
  const int64_t prefix = p.prefix[request];
  const uint64_t* bits = p.ancestors + (request * p.width + node) * p.words;
  for (int64_t j = std::max<int64_t>(0, prefix - first); j < count; ++j) {
    const int64_t slot = first + j - prefix;
    if (!(bits[slot / 64] >> (slot % 64) & 1)) scores[j] = HIDDEN;
  }
  if (p.window <= 0) return;
  const int64_t position = p.position[request * p.width + node];
  for (int64_t j = 0; j < count; ++j) {
    const int64_t slot = first + j - prefix;
    const int64_t key = slot < 0 ? first + j : prefix + p.depth[request * p.tree + slot];
    if (position - key >= p.window) scores[j] = HIDDEN;
  }
}

// Softmax weights of one row over `count` scores in place; updates the running maximum and sum. Returns the old weight.
float weigh(float* scores, int64_t count, float* maximum, float* sum) {
  Vec best = broadcast(HIDDEN);
  for (int64_t j = 0; j < count; j += LANES) {
    const Vec s = *reinterpret_cast<const Vec*>(scores + j);
    best = s > best ? s : best;
  }
  const float top = std::max(*maximum, horizontal_max(best));
  if (top == HIDDEN) {
    std::fill(scores, scores + count, 0.0f);
    return 1.0f;
  }
  const float kept = *maximum == HIDDEN ? 0.0f : std::exp(*maximum - top);
  Vec total = broadcast(0.0f);
  for (int64_t j = 0; j < count; j += LANES) {
    const Vec weight = exp_of(*reinterpret_cast<const Vec*>(scores + j) - top);
    *reinterpret_cast<Vec*>(scores + j) = weight;
    total += weight;
  }
  *sum = *sum * kept + horizontal_sum(total);
  *maximum = top;
  return kept;
}

// Rows [begin, begin + rows) of the tile (query head of the group, then node) against the blocks of one split.
void attend(const Problem& p, int64_t request, int64_t head, int64_t split, int64_t begin, int64_t rows,
            std::vector<float>& queries, std::vector<float>& scores) {
  const int64_t dim = p.head_dim, block = p.block;
  float* result = p.partial_of(request, head, split) + begin * (dim + 2);
  float maximum[ROWS_AT_ONCE], sum[ROWS_AT_ONCE];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t node = (begin + r) % p.width, lane = (begin + r) / p.width;
    const int64_t row = std::max<int64_t>(p.rows[request * p.width + node], 0);
    const float* q = p.query + row * p.query_stride + (head * p.group() + lane) * dim;
    for (int64_t d = 0; d < dim; ++d) queries[r * dim + d] = q[d] * p.scale;
    maximum[r] = HIDDEN;
    sum[r] = 0.0f;
    std::fill(result + r * (dim + 2), result + r * (dim + 2) + dim, 0.0f);
  }
  const int64_t keys = p.keys(request), num_blocks = (keys + block - 1) / block;
  const int64_t from = num_blocks * split / p.splits, to = num_blocks * (split + 1) / p.splits;
  for (int64_t b = from; b < to; ++b) {
    const int64_t first = b * block, used = std::min(block, keys - first);
    // Whole column tiles for the product; what lies behind the last key is hidden below.
    const int64_t cols = (used + TILE_COLS - 1) / TILE_COLS * TILE_COLS;
    const float* k = p.cache + (p.table[request * p.table_stride + b] * p.kv_heads + head) * 2 * block * dim;
    const float* v = k + block * dim;
    multiply<false>(queries.data(), dim, k, block, scores.data(), block, rows, cols, dim);
    for (int64_t r = 0; r < rows; ++r) {
      float* s = scores.data() + r * block;
      if (p.soft_cap > 0)
        for (int64_t j = 0; j < used; ++j) s[j] = std::tanh(s[j] / p.soft_cap) * p.soft_cap;
      hide(p, request, (begin + r) % p.width, first, used, s);
      std::fill(s + used, s + cols, HIDDEN);
      const float kept = weigh(s, cols, maximum + r, sum + r);
      if (kept != 1.0f)
        for (int64_t d = 0; d < dim; ++d) result[r * (dim + 2) + d] *= kept;
    }
    multiply<true>(scores.data(), block, v, dim, result, dim + 2, rows, dim, used);
  }
  for (int64_t r = 0; r < rows; ++r) {
    result[r * (dim + 2) + dim] = maximum[r];
    result[r * (dim + 2) + dim + 1] = sum[r];
  }
}

// Second stage: one output row of one KV head's group out of its splits.
void merge(const Problem& p, int64_t request, int64_t head, int64_t index) {
  const int64_t node = index % p.width, lane = index / p.width, dim = p.head_dim;
  const int64_t row = p.rows[request * p.width + node];
  if (row < 0) return;
  float top = HIDDEN;
  for (int64_t s = 0; s < p.splits; ++s) top = std::max(top, p.partial_of(request, head, s)[index * (dim + 2) + dim]);
  float* out = p.output + row * p.output_stride + (head * p.group() + lane) * dim;
  std::fill(out, out + dim, 0.0f);
  float sum = 0.0f;
  for (int64_t s = 0; s < p.splits; ++s) {
    const float* part = p.partial_of(request, head, s) + index * (dim + 2);
    if (part[dim] == HIDDEN) continue;
    const float weight = std::exp(part[dim] - top);
    sum += weight * part[dim + 1];
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * part[d];
  }
  for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
}

}  // namespace

extern "C" void specinfer_tree_attention(const Problem* problem) {
  const Problem& p = *problem;
  const int64_t tasks = p.requests * p.kv_heads * p.splits;
#pragma omp parallel
  {
    std::vector<float> queries(ROWS_AT_ONCE * p.head_dim), scores(ROWS_AT_ONCE * p.block);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t split = task % p.splits, head = task / p.splits % p.kv_heads, request = task / p.splits / p.kv_heads;
      for (int64_t begin = 0; begin < p.tile(); begin += ROWS_AT_ONCE)
        attend(p, request, head, split, begin, std::min<int64_t>(ROWS_AT_ONCE, p.tile() - begin), queries, scores);
    }
#pragma omp for schedule(static)
    for (int64_t index = 0; index < p.requests * p.kv_heads * p.tile(); ++index)
      merge(p, index / p.tile() / p.kv_heads, index / p.tile() % p.kv_heads, index % p.tile());
  }
}
