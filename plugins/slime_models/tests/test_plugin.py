"""The plugin as slime sees it, and `slime models` as a person does."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from slime_convert.bridges import find_bridge
from slime_core import ConfigError, DataError
from slime_core.plugins import load_plugin
from slime_core.testing.families import FAMILIES, family_config
from slime_core.testing.plugins import check_plugin
from slime_models.command import models as command
from slime_models.families import BRIDGES
from slime_models.presets import presets

pytestmark = pytest.mark.integration


def slime_models(*words):
    answer = CliRunner().invoke(command, words, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("models") if finding.status in ("fail", "warn")] == []


def test_neither_the_plugin_nor_its_command_loads_torch_transformers_or_megatron():
    code = (
        "import sys, slime_models.plugin as p; p.slime_command();"
        "from slime_models.command import models; models(['list'], standalone_mode=False);"
        "print([m for m in ('torch', 'transformers', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_family_is_claimed_by_its_model_type_and_others_are_declined_by_name(models):
    loaded = [load_plugin("models")]
    for small in models.values():
        assert find_bridge(loaded, small.config) is BRIDGES[small.config.model_type]
    for name in FAMILIES:
        config = family_config(name, 84)
        if config.model_type in BRIDGES:
            continue
        with pytest.raises(ConfigError, match=rf"has a bridge for \w+ \(model_type '{config.model_type}'\)") as error:
            find_bridge(loaded, config)
        assert error.value.code == "CFG200"
        assert ", ".join(sorted(BRIDGES)) in error.value.why
        assert "fsdp" in error.value.fix


def test_list_shows_families_and_presets():
    text = slime_models("list")
    assert all(family in text for family in BRIDGES)
    (line,) = (line for line in text.splitlines() if "qwen3-30b-a3b" in line)
    assert " ".join(line.split()) == "qwen3-30b-a3b qwen3_moe 30.5B 3.35B 48 2048 32/4 no Qwen/Qwen3-30B-A3B"


def test_list_as_json_has_exact_numbers():
    answer = json.loads(slime_models("list", "--json"))
    assert [row["name"] for row in answer["presets"]] == list(presets())
    (row,) = (row for row in answer["presets"] if row["name"] == "llama3.1-8b")
    assert (row["total"], row["heads"], row["tied"]) == (8_030_261_248, "32/8", "no")
    assert {row["family"] for row in answer["families"]} == set(BRIDGES)


def test_show_prints_a_bash_array_of_flags():
    lines = slime_models("show", "Qwen3-4B", "--flags").splitlines()
    assert (lines[0], lines[-1]) == ("MODEL_ARGS=(", ")")
    assert "   --num-layers 36" in lines
    assert all(line.startswith("   --") for line in lines[1:-1])
    script = slime_models("show", "qwen3-30b-a3b", "--flags") + 'printf "%s\\n" "${MODEL_ARGS[@]}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[words.index("--moe-layer-freq") + 1] == "[1]*48"


def test_show_tells_parameters_and_fields_of_a_preset():
    text = slime_models("show", "glm-4-9b-0414", "--tensors")
    assert "9,400,279,040 (9.4B)" in text
    assert any(line.split() == ["rotary_percent", "0.5"] for line in text.splitlines())
    assert "model.layers.{layer}.mlp.gate_up_proj.weight   [27392, 4096]" in text


def test_show_as_json_holds_everything(models):
    small = models["deepseek_v3-halves"]
    answer = json.loads(slime_models("show", str(small.folder), "--json"))
    assert answer["family"] == "deepseek_v3"
    assert answer["megatron"] == small.bridge.megatron(small.config)
    kinds = {row["megatron"].split(".")[-2]: row["kind"] for row in answer["tensors"]}
    assert (kinds["linear_q_up_proj"], kinds["linear_kv_down_proj"]) == ("rope_heads", "rope_tail")
    assert "linear_q_proj" not in kinds
    assert "--q-lora-rank 12" in answer["flags"]


def test_show_of_a_family_is_its_table():
    text = slime_models("show", "deepseek_v3")
    assert "(rope_heads, q_lora_rank and not rope_interleave)" in text
    assert "q_b_proj.weight   q q_low" in text
    assert "mscale_all_dim_of_yarn" in text
    answer = json.loads(slime_models("show", "qwen2", "--json"))
    assert answer["megatron"]["add_qkv_bias"] == "= True"
    assert answer["only"] == {"hidden_act": ["silu"], "attention_dropout": [0.0]}


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(ConfigError, match="'qwen3-5b' is neither a preset") as error:
        slime_models("show", "qwen3-5b")
    assert error.value.code == "CFG05"
    assert "did you mean 'qwen3-" in error.value.fix


def test_a_folder_with_a_damaged_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        slime_models("show", str(tmp_path))
