"""`slime eval` and `slime compare` through the real command: figures, records, the same again, a paired test."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core.lora.folder import factors_of, write_adapter
from slime_core.lora.layers import attach
from slime_core.lora.served import served_adapters
from slime_core.lora.spec import LoraSpec

pytestmark = pytest.mark.integration

SETS = """
[rollout]
rollout_max_response_len = 6
rollout_slots = 16
[data]
input_key = "question"
label_key = "answer"
[reward]
custom_rm_path = "judge.py:reward"
[cluster]
cpu_threads = 1
[train]
dtype = "float32"
[eval]
eval_temperature = 1.0
eval_pass_reward = 0.6
eval_prompt_data = ["plain", "kinds.jsonl@[0:3]"]
[[eval.eval_tasks]]
name = "kinds"
prompt_data = "kinds.jsonl"
n_samples_per_prompt = 4
max_response_len = 3
category_key = "kind"
[[eval.eval_tasks]]
name = "greedy"
prompt_data = "kinds.jsonl@[0:2]"
n_samples_per_prompt = 2
temperature = 0
"""

BROKEN = """
from slime_core import Reward


def reward(group, ctx):
    return [Reward(value=0.0, kind="infra_error", reason="the judge is away") for _ in group.samples]
"""


@pytest.fixture
def sets(own):
    """A config of three sets beside the user's files."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "kind": "even" if i % 2 == 0 else "odd"} for i in range(6)]
    (own.path / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (own.path / "sets.toml").write_text(SETS)
    return own.path


def records(path):
    return {file.name: file.read_bytes() for file in sorted(Path(path, "evaluations").iterdir())}


def test_sets_have_their_own_sampling_and_an_evaluation_twice_is_identical(cli, sets):
    answers = []
    for name in ("one", "two"):
        done = cli("eval", sets / "model", sets / "sets.toml", "--run-dir", name, "--json")
        assert done.code == 0, done.err
        answers.append(json.loads(done.out)["evaluations"])
    for figures in (figures for answer in answers for figures in answer.values()):
        del figures["seconds"]
    assert answers[0] == answers[1]
    assert records("one") == records("two")
    assert list(records("one")) == ["greedy-000000.json", "kinds-000000.json", "plain-000000.json"]
    kinds, greedy, plain = (answers[0][name] for name in ("kinds", "greedy", "plain"))
    assert (kinds["samples"], greedy["samples"], plain["samples"]) == (24.0, 4.0, 3.0)
    assert kinds["response_len/max"] <= 3 < plain["response_len/max"] <= 6
    assert {"pass@1", "pass@2", "pass@4", "category/even/pass@4/low", "category/odd/questions"} <= set(kinds)
    assert kinds["pass@1/low"] <= kinds["pass@1"] <= kinds["pass@1/high"]
    assert kinds["pass@1"] < kinds["pass@4"], "some questions are answered rightly once in four"
    saved = json.loads(records("one")["greedy-000000.json"])
    assert all(question["scores"][0] == question["scores"][1] for question in saved["questions"])
    same = cli("compare", "one", "two", "--json")
    assert same.code == 0, same.err
    assert [(s["name"], s["p"], s["difference"]) for s in json.loads(same.out)["sets"]] == [
        (name, 1.0, 0.0) for name in ("greedy", "kinds", "plain")
    ]


def test_an_adapter_folder_is_evaluated_beside_its_base(cli, sets):
    """Greedy answers score as those of the merged model, and not as the base's."""
    model = AutoModelForCausalLM.from_pretrained(sets / "model", dtype=torch.float32)
    adapters = attach(model, LoraSpec(rank=4, alpha=64), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapters.parameters().items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    write_adapter(sets / "adapter", adapters.spec.to_peft(str(sets / "model")), factors_of(adapters, "default"))
    merged = {name: module.merged(key, "default") for name, (module, key) in adapters.weights().items()}
    plain = AutoModelForCausalLM.from_pretrained(sets / "model", dtype=torch.float32)
    plain.load_state_dict(merged, strict=False)
    plain.save_pretrained(sets / "merged")
    AutoTokenizer.from_pretrained(sets / "model").save_pretrained(sets / "merged")
    several = {"lora_rank": 4, "lora_sync": "adapter", "lora_adapters": ["solver", "judge"]}
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in several.items())
    recipe = (sets / "sets.toml").read_text().replace('dtype = "float32"', f'dtype = "float32"\n{keys}')
    (sets / "several.toml").write_text(recipe)
    shutil.copytree(sets / "model", sets / "run" / "final")
    (sets / "run" / "config.toml").write_text(recipe)
    for name in several["lora_adapters"]:
        shutil.copytree(sets / "adapter", sets / "run" / "final" / "adapter" / name)
    answers = {}
    recipes = {"model": "sets", "adapter": "sets", "merged": "several", "run": "several"}
    for name, recipe in recipes.items():
        done = cli("eval", sets / name, sets / f"{recipe}.toml", "--run-dir", f"eval-{name}")
        assert done.code == 0, done.err
        questions = json.loads(records(f"eval-{name}")["greedy-000000.json"])["questions"]
        answers[name] = [question["scores"] for question in questions]
    assert answers["adapter"] == answers["merged"] == answers["run"] != answers["model"]
    under_each = served_adapters(sets / "adapter", several["lora_adapters"])
    assert list(under_each) == several["lora_adapters"], "whichever a set is of, this one answers"
    shutil.rmtree(sets / "run" / "final")
    for name in several["lora_adapters"]:
        shutil.copytree(sets / "adapter", sets / "run" / "final" / "adapter" / name)
    for words in (("run", sets / "sets.toml"), ("run/final",), ("run/final/adapter",)):
        done = cli("eval", sets / words[0], *words[1:])
        assert (done.code, "CFG05" in done.err) == (2, True), done.err
        assert "has 2 adapters: judge, solver" in done.err
        assert f"slime eval {sets / 'run' / 'final' / 'adapter' / 'judge'} CONFIG" in done.err


def test_two_models_are_compared_by_question(cli, sets):
    for name, seed in (("one", "0"), ("two", "5")):
        flags = ("--seed", seed, "--run-dir", name, "--markdown")
        done = cli("eval", sets / "model", sets / "sets.toml", *flags)
        assert done.code == 0, done.err
        assert "| figure | plain | kinds | greedy |" in done.out
        assert re.search(r"\| pass@1 \| \S+ \[\S+, \S+\] \|", done.out)
        assert "## categories of kinds" in done.out
    done = cli("compare", "one", "two", "--markdown")
    assert done.code == 0, done.err
    assert "| set | questions | A | B | B - A |" in done.out
    assert re.search(r"\| kinds \| 6 \|.*sign flip", done.out)
    assert re.search(r"\| plain \| 3 \|.*McNemar", done.out)
    assert "plain: " in cli("compare", "one", Path("two", "evaluations", "plain-000000.json")).out
    assert cli("compare", "one", "two", "--version-a", "3").code == 3


def test_comparing_what_was_never_evaluated_says_what_to_do(cli, tmp_path):
    done = cli("compare", tmp_path, tmp_path)
    assert done.code == 3
    assert "error DAT17" in done.err
    assert "slime eval" in done.err


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["tables", "json"])
def test_a_set_of_which_nothing_could_be_judged_is_no_evaluation(cli, sets, flags):
    (sets / "judge.py").write_text(BROKEN)
    done = cli("eval", sets / "model", sets / "sets.toml", "--run-dir", "run", *flags)
    assert done.code == 4, done.err
    assert "PLG67  nothing could be judged of " in done.err
    for name in ("greedy", "kinds", "plain"):
        assert name in done.err.split("PLG67")[1].splitlines()[0]
    assert "samples could not be judged: the judge is away" in done.err
    if flags:
        assert json.loads(done.out)["error"]["code"] == "PLG67"
