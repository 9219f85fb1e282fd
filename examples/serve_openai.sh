#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An OpenAI-compatible server with token trees: vLLM's own command and one flag.
# Usage: serve_openai.sh [MODEL [more options of vllm serve]]     TREE='{"method":"tree",...}' gives the tree options
set -euo pipefail
bin="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin"
[ -x "$bin/vllm" ] && PATH="$(cd "$bin" && pwd):$PATH"

model="${1:-$(python -m specinfer_vllm.bench.smollm2)}"
cores="0-$(($(nproc) - 1))"
# vLLM's CPU build leaves a core free unless told otherwise; a GPU ignores both.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-$cores}"
export VLLM_CPU_NUM_OF_RESERVED_CPU="${VLLM_CPU_NUM_OF_RESERVED_CPU:-0}"

exec vllm serve "$model" --speculative-config "${TREE:-tree}" \
  --host 127.0.0.1 --dtype float32 --max-model-len 1024 --kv-cache-memory-bytes $((1 << 30)) --enforce-eager "${@:2}"
