#!/usr/bin/env bash
# Megatron's part of the GPU checks and benchmarks; megatron-core is on PYTHONPATH too, and steps.sh says what holds
# for every step.
#   tools/gpu/megatron.sh functional   every family against transformers, float32 and bfloat16, on as many GPUs as there are
#   tools/gpu/megatron.sh more         all other tests of Megatron there are: experts, offload
#   tools/gpu/megatron.sh learn        whole runs with SGLang that learn: on one GPU
#   tools/gpu/megatron.sh learn-two    the same on two: tensor parallel, pipeline; learn-nccl: server and trainer on a GPU each
#   tools/gpu/megatron.sh ray-two      the same placed by Ray (carry its wheel), servers beside ranks and apart; ray-four
#   tools/gpu/megatron.sh step         MFU of a policy step, Qwen3-4B shape, 8k tokens: both backends and a plain loop
#   tools/gpu/megatron.sh long         the same at 16k tokens
#   tools/gpu/megatron.sh gaps         time between the parts of a step, with SGLang; gaps-fsdp: the same with FSDP;
#                                      gaps-keep, gaps-fsdp-keep: where nobody gives memory away
#   tools/gpu/megatron.sh full         a checkpoint of what was given away, on a device that others have filled
#   tools/gpu/megatron.sh experts      experts of a layer in one product against a loop over them
#   tools/gpu/megatron.sh moe          MFU of a policy step of 12 layers of Qwen3-30B-A3B, 8k tokens: both backends, state
#                                      on the host (100 GB of it)
#   tools/gpu/megatron.sh convert      conversion of a model of 8 GB on the disk of $DISK (default /tmp); needs no GPU
#   tools/gpu/megatron.sh core         all tests that are neither Megatron's nor SGLang's
. "$(dirname "$0")/steps.sh"

others() {  # test files of Megatron beside those that have a part of their own
    ls tests/gpu/test_*.py | grep -E 'megatron|expert|offload' |
        grep -v -e test_megatron_on_gpu.py -e test_megatron_with_sglang_on_gpu.py || true
}

core() {  # everything that is neither Megatron's nor SGLang's
    ls tests/gpu/test_*.py | grep -vE 'megatron|expert|sglang|prefill|colocated|checksums|ray'
}

gaps() {  # BACKEND [OPTION...]: time between the parts of a step
    step "gaps-$1${2:+-keep}" 450 python3 tools/bench/bench_step_gaps.py --run --engine sglang --limit "${GAPS_LIMIT:-420}" --steps "${GAPS_STEPS:-6}" --backend "$@"
}

LEARN=tests/gpu/test_megatron_with_sglang_on_gpu.py
for part in "${@:-functional}"; do
    case $part in
        functional) tests megatron-functional 600 -n 4 -p no:benchmark tests/gpu/test_megatron_on_gpu.py ${FUNCTIONAL_K:+-k "$FUNCTIONAL_K"} ;;
        more) [ -n "$(others)" ] && tests megatron-more 240 $(others) ;;
        learn) tests megatron-learn 330 $LEARN -k one ;;
        learn-nccl) tests megatron-learn-nccl 330 $LEARN -k other_gpu ;;
        learn-two) tests megatron-learn-two 470 $LEARN -k "tensor_parallel or pipeline" ;;
        ray-two) tests ray-two 580 tests/gpu/test_ray_on_gpu.py -k two ;;
        ray-four) tests ray-four 580 tests/gpu/test_ray_on_gpu.py -k four ;;
        step) step megatron-step 290 python3 tools/bench/bench_policy_step.py --backend megatron fsdp plain --limit 95 ;;
        long) step megatron-long 400 python3 tools/bench/bench_policy_step.py --length 16384 --sequences 2 --limit 95 --backend megatron fsdp plain ;;
        experts) step experts-one 70 python3 tools/bench/bench_experts.py
            step experts-many 80 python3 tools/bench/bench_experts.py --experts 16 --ranks 8 --tokens 65536 ;;
        moe) step moe 330 python3 tools/bench/bench_policy_step.py --preset qwen3-30b-a3b --layers 12 --sequences 64 \
            --backend fsdp --set train.optimizer=adamw_8bit --warm-up 1 --rounds 2 --limit 280 ;;
        convert) step convert 400 python3 tools/bench/bench_convert.py --gb 8 --folder "${DISK:-/tmp}" ;;
        core) tests core 300 $(core) ${CORE_K:+-k "$CORE_K"} ;;
        full) tests full-device 120 tests/gpu/test_checkpoint_on_gpu.py -k full_device ;;
        gaps) gaps megatron ;;
        gaps-fsdp) gaps fsdp ;;
        gaps-keep) gaps megatron --keep --mem-fraction 0.2 ;;
        gaps-fsdp-keep) gaps fsdp --keep --mem-fraction 0.2 ;;
        *) echo "unknown part $part"; usage ;;
    esac
done
