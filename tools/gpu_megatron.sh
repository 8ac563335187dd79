#!/usr/bin/env bash
# Megatron's part of the GPU checks and benchmarks; slime, its plugins and megatron-core are on PYTHONPATH. Every step is
# bounded, writes a log into $OUT (default /tmp/out), and shows its last lines; one that fails does not keep the next
# from running.
#   tools/gpu_megatron.sh functional   every family against transformers, float32 and bfloat16, on as many GPUs as there are
#   tools/gpu_megatron.sh step         MFU of a policy step, Qwen3-4B shape, 8k tokens: both backends and a plain loop
#   tools/gpu_megatron.sh long         the same at 16k tokens
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

step() {  # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 begin=$SECONDS code=0
    shift 2
    timeout -k 20 "$seconds" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    echo "== $name: exit $code after $((SECONDS - begin)) s"
    tail -n "${LINES_SHOWN:-40}" "$OUT/$name.log"
}

for part in "${@:-functional}"; do
    case $part in
        functional) step megatron-functional 420 python3 -m pytest -m gpu -p no:cacheprovider -q -rA tests/gpu/test_megatron_on_gpu.py ;;
        step) step megatron-step 420 python3 tools/bench_policy_step.py --backend fsdp megatron plain ;;
        long) step megatron-long 420 python3 tools/bench_policy_step.py --length 16384 --sequences 2 --backend fsdp megatron plain ;;
        *) echo "unknown part $part"; exit 2 ;;
    esac
done
