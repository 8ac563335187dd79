"""A run of long samples from its recipe to its report: the trainer's memory does not grow by their logits.

The vocabulary has 32,768 tokens: the logits of a step's two responses would take 1 GiB in float32 at 8,192 tokens a
sample, and 16 GiB at 131,072. The samples share a prompt of half their length, which a pack computes once. Peaks are
those that the run notes, beside its size when it started.
"""

import json

import pytest
from recorded import steps_of

from slime_core.testing.models import char_tokenizer

pytestmark = pytest.mark.system

VOCABULARY = 32_768
RECIPE = """
[rollout]
hf_checkpoint = "model"
init_weights = "random"
rollout_batch_size = 1
n_samples_per_prompt = 2
num_rollout = 1
rollout_max_context_len = {tokens}
rollout_max_response_len = {response}
custom_generate_function_path = "long.py:generate"
[data]
prompt_data = "rows.jsonl"
[reward]
custom_rm_path = "long.py:reward"
[train]
lr = 1e-3
dtype = "float32"
gradient_checkpointing = true
[cluster]
cpu_threads = 1
"""
FUNCTIONS = f"""
import random

from slime_core.types import Status


async def generate(args, sample, sampling_params):
    draw, count = random.Random(sample.index), {{response}}
    response = [draw.randrange(3, {VOCABULARY}) for _ in range(count)]
    sample.append_response(response, [-10.4] * count, text="x" * count, version=0)
    sample.status = Status.COMPLETED
    return sample


async def reward(args, sample, **kwargs):
    return float(sample.tokens[-1] % 2)
"""


@pytest.mark.parametrize(
    ("tokens", "gib"), [(8_192, 0.3), pytest.param(131_072, 0.8, marks=pytest.mark.nightly)], ids=["8k", "128k"]
)
def test_a_run_of_long_samples_stays_within_memory(tmp_path, forked_slime, tokens, gib):
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=tokens, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(str(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "7" * (tokens // 2), "label": "1"}) + "\n")
    (tmp_path / "run.toml").write_text(RECIPE.format(tokens=tokens, response=tokens // 2))
    (tmp_path / "long.py").write_text(FUNCTIONS.replace("{response}", str(tokens // 2)))
    done = forked_slime("run", "run.toml", "--run-dir", "run", timeout=1500)
    assert done.returncode == 0, done.stderr
    (step,), _ = steps_of(tmp_path / "run", 1)
    assert [len(sample.tokens) for sample in step] == [tokens] * 2
    memory = json.loads((tmp_path / "run" / "memory" / "rank-0.json").read_text())
    assert max(memory["peaks"].values()) - memory["start"] < gib * 2**30
