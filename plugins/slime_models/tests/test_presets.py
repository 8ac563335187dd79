"""Presets against published figures and against transformers, and their flags against slime's own reading of them."""

import re
import shlex

import pytest

from slime_core.config.fields import core_keys
from slime_core.weights.native_configs import native_config
from slime_megatron.agreement import disagreements
from slime_megatron.flags import flags, problems
from slime_models.arguments import model_args, pattern
from slime_models.families import BRIDGES
from slime_models.presets import PARTS, count, presets, short

pytestmark = pytest.mark.unit

PUBLISHED = {  # billions on the model cards: all, all but embeddings, one token's
    "qwen3-0.6b": (0.6, 0.44, None),
    "qwen3-1.7b": (1.7, 1.4, None),
    "qwen3-4b": (4.0, 3.6, None),
    "qwen3-8b": (8.2, 6.95, None),
    "qwen3-14b": (14.8, 13.2, None),
    "qwen3-32b": (32.8, 31.2, None),
    "qwen3-30b-a3b": (30.5, 29.9, 3.3),
    "qwen3-235b-a22b": (235, 234, 22),
    "qwen3-next-80b-a3b": (80, 79, 3),
    "qwen3.5-9b": (9, None, None),
    "qwen3.5-27b": (27, None, None),
    "qwen3.5-35b-a3b": (35, None, 3),
    "qwen2.5-0.5b": (0.49, 0.36, None),
    "qwen2.5-1.5b": (1.54, 1.31, None),
    "qwen2.5-3b": (3.09, 2.77, None),
    "qwen2.5-7b": (7.61, 6.53, None),
    "qwen2.5-14b": (14.7, 13.1, None),
    "qwen2.5-32b": (32.5, 31.0, None),
    "qwen2.5-72b": (72.7, 70.0, None),
    "qwen2.5-vl-3b": (3.75, None, None),
    "qwen2.5-vl-7b": (8.29, None, None),
    "qwen2.5-vl-32b": (33.5, None, None),
    "qwen2.5-vl-72b": (73.4, None, None),
    "qwen3-vl-2b": (2.13, None, None),
    "qwen3-vl-4b": (4.44, None, None),
    "qwen3-vl-8b": (8.77, None, None),
    "qwen3-vl-32b": (33.4, None, None),
    "llama3.1-8b": (8.03, None, None),
    "llama3.1-70b": (70.6, None, None),
    "llama3.2-1b": (1.23, None, None),
    "llama3.2-3b": (3.21, None, None),
    "glm-4-9b-0414": (9.4, None, None),
    "glm-4.5-air": (106, None, 12),
    "glm-4.5": (355, None, 32),
    "deepseek-v3": (671, None, 37),
    "kimi-k2": (1026, None, 32),
    "kimi-k2-thinking": (1026, None, 32),
    "mimo-7b-rl": (7.62, None, None),
    "minimax-m2": (229, None, 10),
}
ABSENT = {
    **dict.fromkeys(("glm-4.5-air", "glm-4.5", "minimax-m2", "qwen3-next-80b-a3b"), 1.0),
    **dict.fromkeys(("kimi-k2", "kimi-k2-thinking"), 0.5),
}
"""The share of embedding and output matrix that a card leaves out of a token's parameters."""
IN_BILLIONS = ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b")  # their names count a token's parameters so
STORED = {  # parameters in the published safetensors files
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-4b": 4_437_815_808,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "glm-4-9b-0414": 9_400_279_040,
}
MOVED = {"rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim", "num_nextn_predict_layers"}
MOVED |= {"full_attention_interval"}
"""What config.json may hold and a config class of transformers keeps elsewhere, or reads where it is there."""


def bridge_of(preset):
    return BRIDGES[preset.config.model_type]


def values_of(preset):
    """What its config.json holds."""
    parts = {key: vars(value) for key, value in vars(preset.config).items() if key in PARTS}
    return {**vars(preset.config), **parts}


@pytest.mark.parametrize("name", presets())
def test_the_parameters_of_a_preset_are_the_published_ones(name):
    preset = presets()[name]
    counts = count(bridge_of(preset), preset.config)
    total, beside, active = PUBLISHED[name]
    assert counts.total / 1e9 == pytest.approx(total, rel=0.02)
    assert counts.total == STORED.get(name, counts.total)
    assert beside is None or counts.beside_embeddings / 1e9 == pytest.approx(beside, rel=0.02)
    embeddings = (counts.total - counts.beside_embeddings) * ABSENT.get(name, 0.0)
    of_a_token = (counts.active - embeddings) / 1e9
    rounded = name in IN_BILLIONS and round(of_a_token) == active
    assert rounded or of_a_token == pytest.approx(active or total, rel=0.02)


def test_every_preset_has_a_published_figure_and_a_source():
    assert set(presets()) == set(PUBLISHED)
    assert len({preset.source for preset in presets().values()}) == len(presets())


def test_every_size_that_was_promised_is_there():
    sizes = {
        "qwen3-": "0.6b 1.7b 4b 8b 14b 32b 30b-a3b 235b-a22b next-80b-a3b",
        "qwen3.5-": "9b 27b 35b-a3b",
        "qwen2.5-": "0.5b 1.5b 3b 7b 14b 32b 72b vl-3b vl-7b vl-32b vl-72b",
        "qwen3-vl-": "2b 4b 8b 32b",
        "llama3.": "1-8b 1-70b 2-1b 2-3b",
        "glm-4": "-9b-0414 .5-air .5",
        "deepseek-": "v3",
        "kimi-k2": ",-thinking",
        "mimo-": "7b-rl",
        "minimax-": "m2",
    }
    assert {stem + size for stem, text in sizes.items() for size in re.split("[ ,]", text)} == set(presets())


@pytest.mark.parametrize("name", presets())
def test_a_preset_reads_as_the_config_that_transformers_makes_of_it(name):
    from transformers import AutoConfig

    preset = presets()[name]
    values, bridge = values_of(preset), bridge_of(preset)
    config = native_config(values) or AutoConfig.for_model(**values)
    assert bridge.megatron(config) == bridge.megatron(preset.config)
    assert bridge.sizes(config) == bridge.sizes(preset.config)
    unknown = [key for key in vars(preset.config) if key not in MOVED and not hasattr(type(config)(), key)]
    assert unknown == []


@pytest.mark.parametrize(
    "name", ["qwen3-0.6b", "qwen2.5-7b", "qwen2.5-vl-3b", "qwen3-vl-8b", "llama3.2-3b", "glm-4-9b-0414"]
)
def test_a_preset_counts_what_transformers_builds(name):
    from transformers import AutoConfig

    from slime_core.weights.build import skeleton

    preset = presets()[name]
    model = skeleton(AutoConfig.for_model(**values_of(preset)))
    assert count(bridge_of(preset), preset.config).total == model.num_parameters()


def test_small_models_count_what_transformers_builds(small):
    from slime_core.weights.build import skeleton

    assert count(small.bridge, small.config).total == skeleton(small.config).num_parameters()


def test_a_token_passes_its_share_of_the_experts(models):
    small = models["qwen3_moe"]  # one layer of experts, 2 of 4 chosen, each 3 * 16 * 32
    counts = count(small.bridge, small.config)
    assert counts.total - counts.active == 2 * 3 * 16 * 32


def test_the_flags_of_a_preset_are_those_of_slime_s_script():
    preset = presets()["qwen3-4b"]
    own = {"--swiglu", "--qk-layernorm", "--group-query-attention", "--disable-bias-linear"}
    own |= {"--num-layers 36", "--hidden-size 2560", "--ffn-hidden-size 9728", "--num-attention-heads 32"}
    own |= {"--num-query-groups 8", "--kv-channels 128", "--normalization RMSNorm", "--norm-epsilon 1e-06"}
    own |= {"--use-rotary-position-embeddings", "--rotary-base 1000000", "--vocab-size 151936"}
    assert set(model_args(bridge_of(preset), preset.config)) == own | {"--max-position-embeddings 40960"}


def typed(args):
    """Flags as the [megatron] table that they are read into."""
    known, table = flags(), {}
    for text in args:
        name, *values = shlex.split(text)
        key = name.removeprefix("--").replace("-", "_")
        if key in core_keys():
            continue  # a key of [train], which Megatron's flags need not repeat
        flag = known[key]
        table[flag.name] = (
            flag.kind(values[0]) if values and flag.kind in (int, float, str) else values[0] if values else True
        )
    return table


def check(bridge, config):
    table = typed(model_args(bridge, config))
    assert problems(table) == []
    assert disagreements(table, bridge, config, bridge.megatron(config), bridge.sizes(config)) == []
    return table


@pytest.mark.parametrize("name", presets())
def test_slime_takes_the_flags_of_every_preset_and_finds_nothing_to_object(name):
    preset = presets()[name]
    check(bridge_of(preset), preset.config)


def test_slime_takes_the_flags_of_every_small_model(small):
    table = check(small.bridge, small.config)
    assert ("num_experts" in table) == bool(small.sizes.experts)
    assert ("post_mlp_layernorm" in table) == small.bridge.sandwich
    assert ("multi_latent_attention" in table) == (small.bridge.attention == "mla")


def test_layers_with_experts_are_written_in_runs():
    assert pattern([0, 1, 1, 1]) == "[0]*1+[1]*3"
    assert pattern([1] * 48) == "[1]*48"


def test_numbers_are_told_with_three_digits():
    numbers = (494_032_768, 4_022_468_096, 235_093_634_560, 1_026_408_232_448)
    assert [short(n) for n in numbers] == ["494M", "4.02B", "235B", "1.03T"]
