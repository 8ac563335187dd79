#!/usr/bin/env bash
# Adapters, a base in few bits, and one card of 24 GiB; steps.sh says what holds for every step.
#   tools/gpu/lora.sh check    what a GPU stores and reads in 4 and 8 bits; 8-bit and paged AdamW; a base that goes there by weights
#   tools/gpu/lora.sh 24gb     the recipes of examples/small_gpu under a cap of 24 GiB: peaks of the device; CASES_K=qlora for one
#   tools/gpu/lora.sh step     a step of rank 32 over one of the whole model, Qwen3-4B's shape at 8,192 tokens; with nf4 and fp8
. "$(dirname "$0")/steps.sh"
GPU=${GPU:-0}

case "${1:-}" in
check)
    tests lora-quantised 120 tests/gpu/test_quantised_on_gpu.py
    tests lora-optimizers 200 tests/gpu/test_optimizers_on_gpu.py
    tests lora-base 300 -s tests/gpu/test_24gb_on_gpu.py -k "cap_runs or one_weight" ;;
24gb) tests lora-24gb 590 -s tests/gpu/test_24gb_on_gpu.py -k "${CASES_K:-recipe}" ;;
step)
    for base in auto nf4 fp8; do
        step "lora-step-$base" 200 python3 tools/bench/bench_lora.py --device cuda --preset qwen3-4b --length 8192 \
            --sequences 4 --set "train.base_weights=$base"
    done ;;
*) usage ;;
esac
