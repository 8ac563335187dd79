"""Every family of models trains by flags alone, and trainer and engine agree about its log-probs."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slime_core.testing.families import FAMILIES, RECURRENT, family_model
from slime_core.testing.models import CHAT_TEMPLATE, char_tokenizer
from slime_core.weights.folder import ModelFolder
from slime_core.weights.shards import Shards

pytestmark = pytest.mark.system

REWARD = '''
async def reward(args, sample, **kwargs):
    """Share of digits in the response."""
    return sum(char.isdigit() for char in sample.response) / max(1, len(sample.response))
'''


@pytest.fixture
def work(tmp_path):
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def train(slime, work):
    """Run two steps on the folder ``model``; the last step's line and what was said."""

    def run(*more, model="model"):
        done = slime(
            *("run", "--hf-checkpoint", model, "--prompt-data", "rows.jsonl", "--custom-rm-path", "digits.py:reward"),
            *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--lr", "1e-3"),
            *("--rollout-max-response-len", "30", "--cpu-threads", "1", "--run-dir", "out", *more),
            cwd=work,
        )
        assert done.returncode == 0, done.stderr
        line = (work / "out" / "metrics.jsonl").read_text().splitlines()[-1]
        return json.loads(line), done.stdout + done.stderr

    return run


WITNESSES = ("llama", "gpt2", "gemma2", "gpt-oss", "deepseek-v2", "qwen3-moe")  # attention and experts of each kind


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in WITNESSES)) for name in FAMILIES]
)
def test_a_family_trains_by_flags_alone(train, work, name):
    """Responses go over the windows of 24 tokens; the differences are those of float32."""
    family_model(work / "model", name)
    line, said = train("--dtype", "float32")
    assert line["version"] == 2
    metrics = line["metrics"]
    assert metrics["grad_norm"] > 0
    assert metrics["train_rollout_logprob_abs_diff"] < 1e-4
    assert metrics["prompt_len/max"] + metrics["response_len/max"] > 24
    assert ("slow" in said) == (name in RECURRENT)


def test_a_folder_as_older_tools_wrote_it(train, work):
    """Shards, old names of the config, a padded vocabulary, several end tokens, no padding, no generation config."""
    folder = family_model(work / "new", "llama", vocab_size=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(work / "model", max_shard_size="100KB")
    assert (work / "model" / "model.safetensors.index.json").exists()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, work / "model")
    (work / "model" / "generation_config.json").unlink()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    template = {"pad_token": None, "chat_template": CHAT_TEMPLATE}
    (work / "model" / "tokenizer_config.json").write_text(json.dumps(tokenizer | template))
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"], config["rope_parameters"]
    old = {"torch_dtype": "bfloat16", "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (work / "model" / "config.json").write_text(json.dumps(config | old | {"eos_token_id": [1, 5]}))
    line, said = train("--dtype", "float32")
    assert line["metrics"]["train_rollout_logprob_abs_diff"] < 1e-4
    assert "a response ends at any of 1 <eos> (config.json, the tokenizer); 5 2 (config.json)" in said
    assert "the embedding has 128 rows, the tokenizer 82 ids" in said
    assert "there is no pad token" in said
    assert "prompts are read without the tokenizer's chat template" in said


@pytest.mark.nightly
def test_longrope_within_its_first_length_is_as_fast_as_any(train, work):
    """Phi-3.5's and Phi-4-mini's frequencies, which change beyond the length of the pretraining."""
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [3.0] * 6}
    scaling["original_max_position_embeddings"] = 64
    family_model(work / "model", "phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    line, said = train("--dtype", "float32", "--rollout-max-context-len", "64")
    assert line["metrics"]["train_rollout_logprob_abs_diff"] < 1e-4
    assert "slow" not in said
    line, said = train("--dtype", "float32", "--run-dir", "longer")
    assert "rollout_max_context_len=64 avoids it" in said


def test_the_text_part_of_a_model_of_pictures_trains_and_its_folder_stays_whole(train, work):
    """Qwen3.5's kind: what is written has the layers for pictures as they were, and loads as the whole model."""
    text = {**FAMILIES["qwen3-next"][1], "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(work / "model")
    text = {name: value for name, value in text.items() if "expert" not in name} | {"vocab_size": len(tokenizer)}
    pictures = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.AutoConfig.for_model("qwen3_5", text_config=text, vision_config=pictures)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(work / "model")
    line, _ = train("--dtype", "float32")
    assert line["metrics"]["train_rollout_logprob_abs_diff"] < 1e-4
    whole, info = type(model).from_pretrained(work / "out" / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in whole.state_dict().items():
        if "visual" in name:
            assert torch.equal(tensor, model.state_dict()[name]), name


def test_layers_that_predict_further_ahead_are_kept(train, slime, work):
    """GLM-4.5's kind: a layer after the last is neither run nor trained, and every folder that is written has it."""
    model = family_model(work / "model", "glm4-moe")
    layer = {f"model.layers.2.{name}.weight": torch.randn(8, 4) for name in ("eh_proj", "shared_head.head")}
    save_file(load_file(model / "model.safetensors") | layer, model / "model.safetensors", {"format": "pt"})
    line, _ = train("--dtype", "float32")
    assert line["metrics"]["train_rollout_logprob_abs_diff"] < 1e-4
    done = slime("convert", "fsdp-to-hf", "out", "converted", cwd=work)
    assert done.returncode == 0, done.stderr
    for folder in (work / "out" / "final", work / "converted"):
        shards = Shards.open(folder)
        assert all(torch.equal(shards[name], tensor) for name, tensor in layer.items())
        assert len(shards) == len(Shards.open(model))
        assert ModelFolder.open(folder).build_model("float32") is not None
