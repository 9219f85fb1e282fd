#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Plain vLLM, a chain and a token tree, each behind `vllm serve` with CUDA graphs: are the greedy texts the same, and how
# many tokens per second come at 1, 8 and 64 requests at a time. Starts and stops its servers itself.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: gpu_serve_check.sh [options] [MODEL [SSM...]] [-- more options of vllm serve]

  MODEL             folder or hub id (default: SmolLM2-135M-Instruct, made from a package)
  SSM               small speculative models; without any, `recycling` drafts
  --port N          port of the servers (default: a free one)
  --concurrency L   requests at a time (default "1 8 64"; with --cpu "1 2")
  --chats N         chats of a run, at least; twice the concurrency if that is more (default 8; with --cpu 2)
  --tokens N        most output tokens of a chat (default 128; with --cpu 16)
  --repeats N       runs at each concurrency behind one start of a server (default 3)
  --rounds N        starts of each server, the order turned round every time (default 1)
  --dtype D         of the LLM (default auto; with --cpu float32)
  --tie X           logprobs so close are a tie (default 0.25; 0.001 for float32)
  --start N         seconds that a server may take to start (default 900)
  --out DIR         keep logs and measurements there (default: a temporary folder, kept on failure only)
  --cpu             on vLLM's CPU build, eager, small sizes: shows that the script works, not how fast anything is

Exit code: 0 texts equal or every difference explained, 1 not, 2 it could not be measured.
TEXT
}

die() {
  echo "gpu_serve_check: $*" >&2
  exit 2
}

port='' concurrency='' chats='' tokens='' repeats=3 rounds=1 dtype='' tie='' start=900 out='' cpu=0
words=() extra=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --cpu) cpu=1; shift; continue ;;
    --) shift; extra=("$@"); break ;;
    --port | --concurrency | --chats | --tokens | --repeats | --rounds | --dtype | --tie | --start | --out)
      [ $# -ge 2 ] || die "$1: a value is missing"
      printf -v "${1#--}" %s "$2"
      shift 2
      continue ;;
    -*) usage >&2; die "$1: unknown option" ;;
    *) words+=("$1"); shift ;;
  esac
done
if [ "$cpu" = 1 ]; then
  : "${concurrency:=1 2}" "${chats:=2}" "${tokens:=16}" "${dtype:=float32}"
else
  : "${concurrency:=1 8 64}" "${chats:=8}" "${tokens:=128}" "${dtype:=auto}"
fi
[ -n "$tie" ] || { [ "$dtype" = float32 ] && tie=0.001 || tie=0.25; }
read -r -a levels <<<"$concurrency"
most=1
for each in "${levels[@]}" "$repeats" "$rounds" "$chats" "$tokens" "$start"; do
  [[ $each =~ ^[1-9][0-9]*$ ]] || die "$each: a whole number above 0 is asked for"
done
for each in "${levels[@]}"; do [ "$each" -le "$most" ] || most=$each; done

# -- what must be here -------------------------------------------------------------------------------------------------

bin="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin"
# The environment that is active wins; else the checkout's own.
if ! command -v vllm >/dev/null && [ -x "$bin/vllm" ]; then PATH="$bin:$PATH"; fi
for each in curl python vllm specinfer; do
  command -v "$each" >/dev/null || die "$each: not found; activate the environment that vLLM and specinfer-vllm are installed in"
done
python -c 'import sys; from importlib.util import find_spec; sys.exit(find_spec("vllm") is None)' ||
  die "vllm: this environment's python does not find it; pip install 'specinfer-vllm[gpu]'"
if [ "$cpu" = 0 ]; then
  python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "no GPU: torch finds none. With vLLM's CPU build, --cpu tries the script out in small"
fi

temporary=0
if [ -z "$out" ]; then out="$(mktemp -d)" temporary=1; fi
mkdir -p "$out"
[ -n "$port" ] || port="$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')"
model="${words[0]:-}"
[ -n "$model" ] || model="$(python -m specinfer_vllm.bench.smollm2 | tail -n 1)"

# -- the servers -------------------------------------------------------------------------------------------------------

server='' log=''

stop() {
  [ -n "$server" ] || return 0
  kill -TERM -- "-$server" 2>/dev/null || true
  for _ in {1..60}; do
    kill -0 -- "-$server" 2>/dev/null || break
    sleep 0.5
  done
  kill -KILL -- "-$server" 2>/dev/null || true # whatever it left behind
  wait "$server" 2>/dev/null || true
  server=''
}

finish() {
  local code=$?
  trap - EXIT
  stop
  if [ "$code" -gt 1 ] && [ -s "$log" ]; then
    echo "--- the end of $log" >&2
    tail -n 60 "$log" >&2
  fi
  if [ "$temporary" = 1 ] && [ "$code" = 0 ]; then rm -rf "$out"; else echo "logs and measurements: $out" >&2; fi
  exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

flags=(--host 127.0.0.1 --port "$port" --dtype "$dtype" --max-num-seqs "$most")
if [ "$cpu" = 1 ]; then
  flags+=(--max-model-len 1024 --kv-cache-memory-bytes $((1 << 29)) --enforce-eager)
  # vLLM's CPU build leaves a core free unless told otherwise.
  export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}"
  export VLLM_CPU_NUM_OF_RESERVED_CPU="${VLLM_CPU_NUM_OF_RESERVED_CPU:-0}"
else
  flags+=(--max-model-len 2048)
fi
flags+=("${extra[@]}")
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"

# speculative NAME: what --speculative-config says of it; an SSM of a chain drafts its likeliest token only.
speculative() {
  python - "$1" "${words[@]:1}" <<'TEXT'
import json
import sys

name, ssms = sys.argv[1], sys.argv[2:]
tree = {"method": "tree"} | ({"branches": 1} if name == "chain" else {})
if ssms:
    tree["ssms"] = [{"model": ssm} | ({"width": 1} if name == "chain" else {}) for ssm in ssms]
print(json.dumps(tree))
TEXT
}

# command NAME: fills `line`.
command_of() {
  line=(vllm serve "$model" "${flags[@]}")
  [ "$1" = plain ] || line+=(--speculative-config "$(speculative "$1")")
}

# serve NAME LOG: returns when the server answers.
serve() {
  log=$2
  command_of "$1"
  echo "starting $1: ${line[*]}"
  set -m # a process group of its own
  "${line[@]}" >"$log" 2>&1 &
  server=$!
  set +m
  local deadline=$((SECONDS + start))
  until curl --silent --fail --output /dev/null --max-time 5 "http://127.0.0.1:$port/health"; do
    kill -0 "$server" 2>/dev/null || die "$1: the server ended before it answered"
    [ "$SECONDS" -lt "$deadline" ] || die "$1: the server does not answer after $start seconds (--start)"
    sleep 1
  done
}

names=(plain chain tree)
for name in "${names[@]}"; do
  command_of "$name"
  log="$out/doctor-$name.log"
  specinfer doctor -- "${line[@]}" >"$log" 2>&1 || die "$name: specinfer doctor refuses it"
  # What it says of the command line; the tables before are the environment's.
  python - "$log" <<'TEXT'
import sys

print(open(sys.argv[1]).read().rpartition("\nvllm serve ")[2].partition("\n")[2])
TEXT
done

files=()
for ((round = 1; round <= rounds; round++)); do
  for name in "${names[@]}"; do
    serve "$name" "$out/$round-$name.log"
    python -m specinfer_vllm.bench.serve_check ask --url "http://127.0.0.1:$port" --name "$name" \
      --out "$out/$round-$name.json" --concurrency "${levels[@]}" --chats "$chats" --tokens "$tokens" --repeats "$repeats"
    stop
    files+=("$out/$round-$name.json")
  done
  names=("${names[2]}" "${names[1]}" "${names[0]}")
done
log=''
python -m specinfer_vllm.bench.serve_check compare "${files[@]}" --tie "$tie"
