#!/usr/bin/env bash
# Plans against measurement, on one GPU of 80 GB or more:
#   plan.sh all              ten runs of 0.6 billion weights: full and LoRA, both backends, both engines
#   PLAN_K=embedded plan.sh all    those whose name has the word
#   plan.sh policy           policy steps of Qwen3-4B's shape beside their plans (100 GiB, so a card of 141 GB)
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
case ${1:-} in
all) LINES_SHOWN=400 tests plan 580 -s tests/gpu/test_plan_on_gpu.py ${PLAN_K:+-k "$PLAN_K"} ;;
policy) step policy 580 python3 tools/bench/bench_policy_step.py --backend fsdp megatron ;;
*) usage ;;
esac
