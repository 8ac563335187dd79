#!/usr/bin/env bash
# The kernel judge's part of the GPU checks and benchmarks; steps.sh says what holds for every step.
#   tools/gpu/kernels.sh judge     candidates in the sandbox with CUDA; honest kernels timed at full size, cheats that only a GPU shows; the service
#   tools/gpu/kernels.sh bench     what a fresh process pays before its first kernel; full judgements a second, timing and all
#   tools/gpu/kernels.sh run       dialogues through SGLang ($SGLANG_SITE), every kernel compiled and timed, GRPO on it
#   tools/gpu/kernels.sh examples  examples/ with SGLang's server in place of the embedded engine
. "$(dirname "$0")/steps.sh"
uuid() { nvidia-smi --query-gpu=uuid --format=csv,noheader --id="${GPU:-0}" | head -1; }

case "${1:-}" in
judge)
    tests kernels-sandbox 200 tests/gpu/test_sandbox_on_gpu.py
    tests kernels-judge 330 tests/gpu/test_kernel_judge_on_gpu.py
    tests kernels-service 150 tests/gpu/test_kernel_service_on_gpu.py ;;
bench)
    step cuda-start 60 python3 tools/bench/bench_cuda_start.py
    step cuda-start-one 60 python3 tools/bench/bench_cuda_start.py --set CUDA_DEVICE_MAX_CONNECTIONS=1
    step kernels-bench 220 python3 tools/bench/bench_judge.py --seconds 10 --workers 16 --askers 1 4 8 12 16 --gpus "$(uuid)" ;;
examples) tests examples 570 -s tests/gpu/test_examples_on_gpu.py ${EXAMPLES_K:+-k "$EXAMPLES_K"} ;;
run) tests kernels-run 880 -s tests/gpu/test_kernel_run_on_gpu.py ;;
*) usage ;;
esac
