"""Every launch script of slime's, by its flags: it runs here, or what is in the way is named."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from slime_compat.launch.check import FAMILIES, check_launch
from slime_compat.launch.script import LaunchScript, read_script
from slime_core.testing import tiny_model
from slime_core.weights.fp8 import BlockFormat
from slime_models.presets import presets

pytestmark = pytest.mark.integration

FACTS = tomllib.loads((Path(__file__).parent / "launches.toml").read_text())
PRESETS = {"glm4-9b": "glm-4-9b-0414", "glm4.5-355b-a32b": "glm-4.5", "qwen3-4b-instruct-2507": "qwen3-4b"}
PRESETS |= dict.fromkeys(("qwen3.5-35b-a3b-vl", "qwen3.6-35b-a3b"), "qwen3.5-35b-a3b")
"""Where a file of model flags is not called as the preset."""
LATENT = {
    "deepseek-v3": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000, "factor": 40, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "rms_norm_eps": 1e-6,
    },
    "glm4.7-30B-A3B": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "num_nextn_predict_layers": 1,
    },
    "moonlight": {
        **{"num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "vocab_size": 163840, "q_lora_rank": None, "n_routed_experts": 64},
        **{"moe_intermediate_size": 1408, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1},
        **{"topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
}
"""What config.json of the DeepSeek kind says beside transformers' defaults."""
LONG_CONTEXT = ("qwen3-4b-sft", "Qwen3-4B-Instruct-2507")
"""Folders of Qwen3-4B's shape with another rotary base."""
REFUSED = {
    "run-glm4.7-30B-A3B": "8 trainer ranks do not divide into expert groups of 16",
    "run-glm5-744B-A40B": "model_type 'glm_moe_dsa'",
    "run-glm5.2-744B-A40B": "model_type 'glm_moe_dsa'",
    "low_precision/run-qwen3-30b-a3b-fp8": "--fp8-format cannot be had",
    "geo3k_vlm/run_geo3k_qwen35": "media that no engine here would see",
    "delta_weight_sync/run-glm4.7-30B-A3B-delta": "--update-weight-mode cannot be had",
}
"""What is in the way of the scripts that do not run, in the message."""

CORRECTED = {"run-glm4.7-30B-A3B": ("--actor-num-nodes", "2")}
"""Flags with which a script runs that megatron-core itself would refuse."""

INT4 = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 32}}},
}
RANDOM = ("--init-weights", "random")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with rows."""
    path = tmp_path_factory.mktemp("launch")
    (path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 256)
    tiny_model(path / "tiny", weights=False)
    (path / "empty.yaml").write_text("{}\n")
    (path / "sets.yaml").write_text(f"eval:\n  datasets:\n    - {{name: aime, path: {path / 'rows.jsonl'}}}\n")
    return path


def model_folder(place, model, name):
    """A folder with the config.json of a script's model."""
    family = next((family for start, family in FAMILIES.items() if name.lower().startswith(start)), "deepseek_v3")
    preset = presets().get(PRESETS.get((model or name).lower(), model.lower()))
    config = dict(vars(preset.config)) if preset else {"model_type": family, **LATENT.get(model, {})}
    if config["model_type"].endswith("_text"):  # the language model of one of pictures and text
        config = {"model_type": family, "text_config": config, "tie_word_embeddings": config["tie_word_embeddings"]}
    if "fp8" in name.lower() or name in ("DeepSeek-R1", "Kimi-K2-Instruct", "MiniMax-M2.5"):
        config["quantization_config"] = BlockFormat().table()
    elif "int4" in name.lower() or name == "Kimi-K2-Thinking":
        config["quantization_config"] = INT4
    if name in LONG_CONTEXT:
        config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}}
    folder = place / model / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((place / "tiny" / file).read_bytes())
    return folder


def launch_of(name, place):
    """The command of a script, with files that are there."""
    script = FACTS["scripts"][name]
    base = f" {' '.join(FACTS['base'].split())}".split(" --")[1:] if script.get("base", True) else []
    lacks = [flag[2:] for flag in script.get("lacks", "").split()]
    shared = [f"--{flag}" for flag in base if flag.split()[0] not in lacks]
    text = " ".join([FACTS["models"].get(script["model"], ""), *shared, script["words"]])
    folder = model_folder(place, script["model"], script["folder"])
    words = [
        word.replace("MODEL", str(folder)).replace("ROWS", str(place / "rows.jsonl")).replace("OUT", str(place))
        for word in shlex.split(text)
        if word != "--moe-enable-deepep"  # a library that has to be installed
    ]
    for flag, file in (("--custom-config-path", "empty.yaml"), ("--eval-config", "sets.yaml")):
        if flag in words:
            words[words.index(flag) + 1] = str(place / file)
    return LaunchScript(script=place / f"{Path(name).name}.sh", door=script["door"], words=words)


@pytest.mark.parametrize("name", FACTS["scripts"])
def test_a_launch_script_runs_here_or_what_is_in_the_way_is_named(name, place):
    launch = launch_of(name, place)
    check = check_launch(launch, RANDOM)
    text = "\n".join(map(str, check.errors))
    assert check.missing == []
    if name in REFUSED:
        assert REFUSED[name] in text, "a family that has a bridge now needs its preset in PRESETS"
        if name not in CORRECTED:
            return
        check = check_launch(launch, [*RANDOM, *CORRECTED[name]])
        text = "\n".join(map(str, check.errors))
    assert check.errors == [], text
    assert " ranks = " in check.model  # the layout fits, and the flags agree with config.json


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("DeepSeek-R1/", ""),
        ("Kimi-K2-Thinking/", ""),
        ("Qwen3-4B-FP8", ""),
        ("Qwen3-30B-A3B-INT4", ""),
        ("Qwen3-4B-AWQ", "Qwen3-4B-AWQ is quantised"),
        ("Qwen3-Next-80B-A3B-Thinking", ""),
        ("Qwen3.5-27B", ""),
        ("DeepSeek-R1-Distill-Qwen-7B", ""),
        ("DeepSeek-V3-bf16", ""),
        ("MiniMax-M2.5-bf16", ""),
        ("GLM-4.7-Flash", ""),
        ("$(cat FP8)", ""),
    ],
)
def test_a_model_is_judged_by_its_name_where_the_folder_before_it_is_not_known(tmp_path, folder, error):
    script = tmp_path / "run.sh"
    script.write_text(
        f"CKPT=(--hf-checkpoint ${{BASE_DIR}}/{folder})\npython3 train.py --n-samples-per-prompt 8 --num-rollout 1 --rollout-max-response-len 8 ${{CKPT[@]}}\n"
    )
    check = check_launch(read_script(script, {}))
    assert [error in str(problem) for problem in check.errors] == ([True] if error else [])
    assert error or check.model.startswith("not compared: ${BASE_DIR}/")
    assert ("its fp8 loads in blocks" in check.model) == ("FP8" in folder and "$(" not in folder)
