"""slime's MODEL_ARGS arrays against configs of the models they are for: the same model, or the flag that disagrees."""

import shlex
from types import SimpleNamespace

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError
from slime_megatron.flags import kinds, problems
from slime_megatron.settings import settings
from slime_models.arguments import model_args
from slime_models.families import BRIDGES
from slime_models.presets import presets

pytestmark = pytest.mark.unit

COMMON = "--swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention"
QWEN = f"{COMMON} --use-rotary-position-embeddings --norm-epsilon 1e-6"
QWEN2 = f"{QWEN} --add-qkv-bias --vocab-size 151936"
QWEN3 = f"{QWEN} --qk-layernorm --kv-channels 128 --vocab-size 151936 --rotary-base 1000000"
LLAMA = f"{COMMON} --use-rotary-position-embeddings --norm-epsilon 1e-5 --rotary-base 500000 --vocab-size 128256 "
LLAMA += "--kv-channels 128 --use-rope-scaling --max-position-embeddings 131072 --num-query-groups 8"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8 --num-experts 128 "
    "--moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0 --position-embedding-type rope --rotary-percent 1.0"
)
ROUTED = (
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 8 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0"
)
GLM = (
    f"{COMMON} --num-attention-heads 96 --num-query-groups 8 --kv-channels 128 --add-qkv-bias {UNTIED} {ROUTED} "
    "--position-embedding-type rope --rotary-percent 0.5 --vocab-size 151552 --rotary-base 1000000"
)
SCRIPTS = {
    "glm-4.5-air": f"{GLM} --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --moe-ffn-hidden-size 1408 "
    f"--moe-shared-expert-intermediate-size 1408 --num-experts 128 --moe-layer-freq '{[0] + [1] * 45}'",
    "glm-4.5": f"{GLM} --qk-layernorm --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 "
    "--moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536 --num-experts 160 "
    f"--moe-router-topk-scaling-factor 2.5 --moe-layer-freq '{[0] * 3 + [1] * 89}'",
    "qwen3-0.6b": f"{QWEN3} --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
    "--num-query-groups 8",
    "qwen3-4b": f"{QWEN3} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--num-query-groups 8",
    "qwen3-8b": f"{QWEN3} --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 "
    f"--num-query-groups 8 {UNTIED}",
    "qwen3-32b": f"{QWEN3} --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64 "
    f"--num-query-groups 8 {UNTIED}",
    "qwen3-30b-a3b": f"{QWEN3} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    f"--num-query-groups 4 {UNTIED} {EXPERTS} --moe-ffn-hidden-size 768 --moe-layer-freq '{[1] * 48}'",
    "qwen3-235b-a22b": f"{QWEN3} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
    f"--num-query-groups 4 {UNTIED} {EXPERTS} --moe-ffn-hidden-size 1536 --moe-layer-freq '{[1] * 94}'",
    "qwen2.5-0.5b": f"{QWEN2} --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 "
    "--num-query-groups 2 --rotary-base 1000000",
    "qwen2.5-3b": f"{QWEN2} --num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 "
    "--num-query-groups 2 --rotary-base 1000000",
    "llama3.1-8b": f"{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"--rotary-scaling-factor 8.0 {UNTIED}",
    "llama3.2-3b": f"{LLAMA} --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 "
    "--rotary-scaling-factor 32.0",
    "glm-4-9b-0414": f"--spec slime_plugins.models.glm4 get_glm_spec {COMMON} --num-layers 40 --hidden-size 4096 "
    "--ffn-hidden-size 13696 --num-attention-heads 32 --num-query-groups 2 --use-rotary-position-embeddings "
    "--add-qkv-bias --norm-epsilon 1e-5 --rotary-base 10000 --vocab-size 151552 --post-self-attn-layernorm "
    f"--post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion {UNTIED}",
    "deepseek-v3": "--swiglu --disable-bias-linear --normalization RMSNorm --num-layers 61 --hidden-size 7168 "
    "--ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --position-embedding-type rope "
    f"--norm-epsilon 1e-6 {UNTIED} --vocab-size 129280 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 "
    "--rotary-base 10000 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --no-rope-fusion "
    f"--num-experts 256 --moe-layer-freq '{[0] * 3 + [1] * 58}' --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-pre-softmax --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 "
    "--moe-token-dispatcher-type alltoall --moe-router-bias-update-rate 0 --moe-router-group-topk 4 "
    "--moe-router-num-groups 8 --moe-grouped-gemm --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-permute-fusion",
}
"""What slime's scripts/models/*.sh say, by our name of the model."""


def table(line):
    return load_config(None, shlex.split(line)).table("megatron")


def made(name, line, **config):
    found = SimpleNamespace(**{**vars(presets()[name].config), **config})
    train = load_config(None, ["--dtype", "bfloat16"]).train
    return settings(BRIDGES[found.model_type], found, table(line), train, 1, "cuda")


def plain(found):
    """Settings without what a flag may add: a notice, and losses that weigh nothing."""
    losses = ("moe_router_load_balancing_type",)
    return found.model, found.sizes, {n: value for n, value in found.transformer.items() if n not in losses}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_array_of_slimes_script_is_the_model_of_the_config(name):
    assert problems(table(SCRIPTS[name])) == []
    assert plain(made(name, SCRIPTS[name])) == plain(made(name, ""))


@pytest.mark.parametrize("name", presets())
def test_the_array_that_we_print_is_read_back_as_the_same_model(name):
    config = presets()[name].config
    line = " ".join(model_args(BRIDGES[config.model_type], config))
    assert plain(made(name, line)) == plain(made(name, ""))


@pytest.mark.parametrize(
    "name",
    [n if n in ("qwen2.5-0.5b", "qwen3-30b-a3b") else pytest.param(n, marks=pytest.mark.nightly) for n in SCRIPTS],
)
def test_each_number_of_an_array_is_compared(name):
    """Every flag of the array that takes a number, changed alone, is named with what config.json has."""
    words = shlex.split(SCRIPTS[name])
    harmless = {"moe_aux_loss_coeff", "moe_router_bias_update_rate"} | (
        {"kv_channels"} if "deepseek" in name else set()
    )
    changed = 0
    for at, word in enumerate(words):
        flag = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or flag in harmless or kinds()[flag] not in (int, float):
            continue
        other = str(float(words[at + 1]) * 2) if kinds()[flag] is float else str(int(words[at + 1]) * 2)
        with pytest.raises(ConfigError) as caught:
            made(name, shlex.join([*words[: at + 1], other, *words[at + 2 :]]))
        assert caught.value.what.startswith(f"{word} {other} disagrees"), word
        changed += 1
    assert changed >= 8


def test_a_script_that_is_wrong_is_found_out():
    """slime's array for Qwen2.5 1.5B says a rotary base of 10,000; the model was trained with a million."""
    line = f"{QWEN2} --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 "
    with pytest.raises(ConfigError) as caught:
        made("qwen2.5-1.5b", line + "--num-query-groups 2 --rotary-base 10000")
    assert caught.value.what.startswith("--rotary-base 10000.0 disagrees with the model folder, where rotary_base is")
    assert caught.value.where == "megatron.rotary_base"
    assert "rope_theta = 1000000.0" in caught.value.why


def test_all_flags_that_disagree_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        made("qwen3-4b", SCRIPTS["qwen3-8b"])
    flags = ("--hidden-size 4096", "--ffn-hidden-size 12288", UNTIED)
    assert caught.value.what == f"{len(flags)} problems in the configuration"
    assert all(flag in caught.value.why for flag in flags)
