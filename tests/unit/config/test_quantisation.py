"""Rollouts in fp8: when `auto` means it, when `use_tis` comes with it, and what cannot stand beside it."""

import json

import pytest

from slime_core.config.dump import to_toml
from slime_core.config.load import read, stages
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit

FP8 = "--rollout-quantization=fp8"


@pytest.mark.parametrize(
    ("flags", "use_tis", "said"),
    [
        ([], True, "use_tis weighs tokens"),
        (["--use-tis"], True, "use_tis weighs tokens"),
        (["--no-use-tis"], False, "no correction is on"),
        (["--use-rs"], False, ""),
        (["--use-rollout-logprobs"], False, ""),
        (["--rs-veto-threshold=0.01"], False, ""),
        (["--loss-type=sft_loss"], False, ""),
    ],
)
def test_tis_is_on_unless_a_correction_is_named(flags, use_tis, said):
    loaded = read(None, [FP8, *flags])
    assert loaded.config.train.use_tis is use_tis
    texts = [text for text in loaded.notices if "rollout_quantization" in text]
    assert len(texts) == bool(said)
    assert said in "".join(texts)
    assert read(None, flags).config.train.use_tis is ("--use-tis" in flags)


def test_a_correction_of_one_stage_counts_as_named_and_a_dumped_config_stays_as_it_is(tmp_path):
    recipe = tmp_path / "r.toml"
    text = '[rollout]\nrollout_quantization = "fp8"\n[[stage]]\nname = "a"\n[[stage]]\nname = "b"\n'
    recipe.write_text(text)
    config = read(recipe).config
    assert [stage.train.use_tis for stage in stages(config)] == [True, True]
    recipe.write_text(to_toml(config))
    assert read(recipe).config == config
    recipe.write_text(text + "use_rollout_logprobs = true\n")
    assert [stage.train.use_tis for stage in stages(read(recipe).config)] == [False, False]


@pytest.mark.parametrize(
    ("table", "engine", "kind"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "sglang", "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "local", "auto"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "sglang", "auto"),
        (None, "sglang", "auto"),
    ],
)
def test_auto_is_fp8_where_servers_have_a_folder_in_fp8(tmp_path, table, engine, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": table}))
    flags = ["--hf-checkpoint", str(tmp_path), "--rollout-engine", engine, "--device", "cuda", "--dtype", "bfloat16"]
    config = read(None, flags).config
    assert (config.rollout.rollout_quantization, config.train.use_tis) == (kind, kind == "fp8")
    assert read(None, [*flags, "--rollout-quantization", "none"]).config.train.use_tis is False


def test_true_on_policy_mode_is_refused():
    with pytest.raises(ConfigError, match="true_on_policy_mode with rollout_quantization = fp8"):
        read(None, [FP8, "--true-on-policy-mode"])
