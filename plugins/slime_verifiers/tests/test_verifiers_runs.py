"""Whole runs on environment packages of verifiers, each in the interpreter that has verifiers."""

import dataclasses
import json
import signal

import pytest
import torch
from recorded import steps_of
from transformers import AutoModelForCausalLM
from trial_model import make_model

pytestmark = [pytest.mark.system, pytest.mark.environments]

RECIPE = """
plugins = ["verifiers"]
seed = 3
data.apply_chat_template = true
[rollout]
hf_checkpoint = "model"
num_rollout = 2
rollout_max_response_len = 6
[train]
lr = 1e-2
dtype = "float32"
[cluster]
cpu_threads = 1
"""
THREE = f"""
{RECIPE}
[[data.tasks]]
name = "digit_share"
[[data.tasks]]
name = "number_hunt"
[[data.tasks]]
name = "phone_book"
[eval]
eval_tasks = [{{ name = "digit_share_heldout" }}, {{ name = "number_hunt_heldout" }}, {{ name = "phone_book_heldout" }}]
eval_interval = 2
skip_eval_before_train = true
[plugin.verifiers.environments]
digit_share = {{ env = "digit-share", env_args.taskset.word = "say", eval_env_args.taskset.num_tasks = 4 }}
number_hunt = {{ env = "owner/number-hunt@1.0", heldout = 2 }}
phone_book = {{ env = "phone-book", heldout = 2 }}
[plugin.verifiers]
tool_parser = "hermes"
"""


@pytest.fixture
def train(forked_slime, tmp_path, environments_python, environment_path):
    """Run `slime run` with a recipe and flags in the test's folder."""
    make_model(tmp_path / "model")

    def train(name, recipe="", *flags, code=0, **env):
        (tmp_path / "recipe.toml").write_text(recipe)
        fresh = ("recipe.toml", "--python", environments_python, "--run-dir", name, *flags)
        resumed = ("--resume", name)
        done = forked_slime(
            *("run", *(fresh if recipe else resumed)),
            cwd=tmp_path,
            timeout=240,
            PYTHONPATH=environment_path,
            **env,
        )
        assert done.returncode == code, done.stderr
        return tmp_path / name

    return train


def log_probs(model, sample):
    """Of a sample's response tokens, by transformers alone."""
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
    places = range(sample.prompt_length, len(sample.tokens))
    return [float(logits[place - 1, sample.tokens[place]]) for place in places]


def is_the_engines(model, sample):
    """Whether what trains has the log-probs that the engine drew it with."""
    pairs = zip(log_probs(model, sample), sample.rollout_log_probs, sample.loss_mask, strict=True)
    return all(abs(own - drawn) < 1e-4 for own, drawn, mask in pairs if mask)


def test_one_turn_several_turns_and_tools_train_on_the_tokens_that_the_engine_drew(train, tmp_path):
    run = train("three", THREE, "--rollout-batch-size", "6", "--n-samples-per-prompt", "4")
    steps, counts = steps_of(run, 2)
    assert counts["trained"] == counts["issued"] == 48
    samples = [sample for step in steps for sample in step]
    by_task = {name: [s for s in samples if s.task == name] for name in ("digit_share", "number_hunt", "phone_book")}
    assert all(by_task.values())
    for sample in by_task["digit_share"]:
        assert "say " in str(sample.prompt)
        assert sample.reward == 2 * sample.metadata["reward_terms"]["digits"]
        assert sample.metadata["reward_terms"]["length"] == len(sample.metadata["chat"]["answer"].strip())
    assert {sample.metadata["reward_terms"]["turns"] for sample in by_task["number_hunt"]} > {3.0}
    assert all(
        sample.status == "truncated" for sample in by_task["number_hunt"] if sample.metadata["chat"]["calls"] == 3
    )
    looks = [sample.metadata["reward_terms"]["looks"] for sample in by_task["phone_book"]]
    assert any(looks)
    assert len(set(looks)) > 1  # every episode has a state of its own
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert all(is_the_engines(model, sample) for sample in steps[0])
    for sample in steps[0][:3]:
        place = next(place for place, mask in enumerate(sample.loss_mask) if mask) + sample.prompt_length
        tokens = [*sample.tokens[:place], sample.tokens[place] ^ 1, *sample.tokens[place + 1 :]]
        assert not is_the_engines(model, dataclasses.replace(sample, tokens=tokens))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["metrics"]["train_rollout_logprob_abs_diff"] < 1e-5 for line in lines if line["kind"] == "step")


LOCKSTEP = ("--no-colocate", "--max-staleness", "1", "--async-schedule", "lockstep")


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [(), LOCKSTEP], ids=["sync", "lockstep"])
def test_a_run_that_is_killed_in_an_episode_goes_on_to_the_same_weights(train, tmp_path, ahead):
    trouble = RECIPE + "[[data.tasks]]\nname = 'verifiers'\n[plugin.verifiers]\nenv = 'trouble'\nheldout = 0\n"
    trouble += "env_args.taskset.words = ['a', 'b', 'c', 'd']\n"
    flags = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--save-interval", "1", "--rollout-shuffle")
    flags += ahead
    whole = train("whole", trouble, *flags)
    last = str(steps_of(whole, 2)[0][1][-1].prompt).split(":")[1].split()[0]
    train("killed", trouble, *flags, code=-signal.SIGKILL, TROUBLE_KILLS=last)
    train("killed")
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.mark.nightly
def test_a_random_model_learns_an_environment(train):
    learning = RECIPE.replace("num_rollout = 2", "num_rollout = 25") + "[plugin.verifiers]\nenv = 'digit-share'\n"
    run = train("learns", learning, "--rollout-batch-size", "4", "--n-samples-per-prompt", "16")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["metrics"]["reward/mean"] for line in lines if line["kind"] == "step"]
    assert rewards[0] < 0.8
    assert rewards[-1] > 1.6  # of 2: four letters in five are digits
