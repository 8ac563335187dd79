#!/usr/bin/env bash
# The embedded engine against SGLang's server on one GPU; steps.sh says what holds for every step. SGLang is in
# $SGLANG_SITE or $SLIME_SGLANG_PYTHON.
#   tools/gpu/engine_vs_sglang.sh all          135M, 0.6B and 4B shapes, 64, 256 and 1,024 in flight: a table
#   tools/gpu/engine_vs_sglang.sh SHAPE ...    those shapes, each with a time limit of its own
GPU=${GPU-${CUDA_VISIBLE_DEVICES-0}}
. "$(dirname "$0")/steps.sh"

[ $# -gt 0 ] || usage
[ "$1" = all ] && set -- 135M 0.6B 4B
for shape in "$@"; do
    step "engine-$shape" "${LIMIT:-400}" python3 tools/bench/bench_engine_vs_sglang.py --shapes "$shape"
done
