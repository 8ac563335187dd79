"""slime's file of evaluation sets, in its three forms, and what is refused of it."""

import json

import pytest

from slime_core.config.load import load_config
from slime_core.config.rules import notices
from slime_core.config.schema import Config
from slime_core.config.sections.evaluation import EvalSection, EvalTask
from slime_core.errors import ConfigError
from slime_core.rollout.groups import evaluation_params

pytestmark = pytest.mark.unit

YAML = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 1, top_p: 0.9}
  datasets:
    - {name: aime, path: "aime.jsonl@[0:30]", rm_type: deepscaler}
    - {name: own, path: own.jsonl, custom_rm_path: judge.py:fn, temperature: 0.2, max_response_len: 64, label_key: a}
"""
TABLE = {
    "defaults": {"n_samples_per_eval_prompt": 4, "temperature": 1, "top_p": 0.9},
    "datasets": [
        {"name": "aime", "path": "aime.jsonl@[0:30]", "rm_type": "deepscaler"},
        {
            **{"name": "own", "path": "own.jsonl", "custom_rm_path": "judge.py:fn"},
            **{"temperature": 0.2, "max_response_len": 64, "label_key": "a"},
        },
    ],
}
TOML = """
[defaults]
n_samples_per_eval_prompt = 4
temperature = 1
top_p = 0.9
[[datasets]]
name = "aime"
path = "aime.jsonl@[0:30]"
rm_type = "deepscaler"
[[datasets]]
name = "own"
path = "own.jsonl"
custom_rm_path = "judge.py:fn"
temperature = 0.2
max_response_len = 64
label_key = "a"
"""


@pytest.fixture
def folder(tmp_path):
    """An `evals/` folder with data, next to a recipe."""
    path = tmp_path / "evals"
    path.mkdir()
    for name in ("aime.jsonl", "own.jsonl", "judge.py"):
        (path / name).write_text("")
    return path


def load(folder, name, text, *flags):
    (folder / name).write_text(text)
    recipe = folder.parent / "recipe.toml"
    recipe.write_text(
        f'[eval]\neval_config = "evals/{name}"\neval_tasks = [{{name = "first", prompt_data = "evals/own.jsonl"}}]\n'
    )
    return load_config(recipe, flags)


@pytest.mark.parametrize(
    ("name", "text"), [("sets.yaml", YAML), ("sets.json", json.dumps(TABLE)), ("sets.toml", TOML)], ids=str.upper
)
def test_sets_are_added_with_their_defaults_and_paths_of_the_files_folder(folder, name, text):
    config = load(folder, name, text)
    first, aime, own = config.eval.eval_tasks
    assert first.name == "first"
    assert aime == EvalTask(
        **{"name": "aime", "prompt_data": f"{folder}/aime.jsonl@[0:30]", "reward": "deepscaler"},
        **{"n_samples_per_prompt": 4, "temperature": 1.0, "top_p": 0.9},
    )
    assert (own.reward, own.temperature, own.label_key) == (f"{folder}/judge.py:fn", 0.2, "a")
    assert config.eval.eval_config == "", "the config of the run needs the file no more"


@pytest.mark.parametrize(
    ("text", "code", "what"),
    [
        ("datasets: [{name: a, temprature: 1}]", "CFG01", "no key 'temprature'"),
        ("datasets: [{name: a, path: x, prompt_data: y}]", "CFG07", "'prompt_data' a second time"),
        ("datasets: {name: a}", "CFG06", "holds no evaluation sets"),
        ("eval: 3", "CFG06", "holds no evaluation sets"),
        ("[1, 2]", "CFG06", "holds no table of keys"),
        ("default: {}\ndatasets: []", "CFG06", "holds no evaluation sets"),
        ("a: [", "CFG06", "cannot be read"),
        ("eval:\n  datasets: {]", "CFG06", "(line 2, column 14)"),
        ("datasets: [{name: a, top_p: 2}]", "CFG03", "eval.eval_tasks[1].top_p"),
        ("datasets: [{name: a, path: gone.jsonl}]", "CFG05", "eval.eval_tasks[1].prompt_data"),
        ("x: " + "1" * (1 << 20), "CFG08", "more than 1 MiB"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(folder, text, code, what):
    with pytest.raises(ConfigError) as caught:
        load(folder, "sets.yaml", text)
    assert (caught.value.code, what in str(caught.value)) == (code, True), caught.value
    assert "sets.yaml" in caught.value.where


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(ConfigError, match=r"gone\.yaml") as caught:
        load_config(None, ["--eval-config", str(folder / "gone.yaml")])
    assert caught.value.code == "CFG05"


def test_a_stage_cannot_bring_a_file_of_its_own(folder):
    (folder / "sets.yaml").write_text(YAML)
    recipe = folder.parent / "recipe.toml"
    recipe.write_text('[[stage]]\nname = "one"\neval_config = "evals/sets.yaml"\n')
    with pytest.raises(ConfigError, match="a stage sets its own eval_config"):
        load_config(recipe)


def test_greedy_samples_of_a_set_are_told_to_be_equal():
    one = EvalTask(name="held", temperature=0.0, n_samples_per_prompt=4)
    (told,) = notices(Config(eval=EvalSection(eval_tasks=(one, EvalTask(name="other", temperature=0.0)))))
    assert "evaluation set held: temperature = 0 is greedy" in told


def test_a_sets_own_sampling_stands_before_the_sections():
    config = Config(eval={"eval_temperature": 0.5, "eval_top_k": 7, "eval_max_response_len": 9})
    plain, own = EvalTask(name="a"), EvalTask(name="b", temperature=0.0, top_p=0.5, top_k=0, max_response_len=3)
    found = [
        (p.temperature, p.top_p, p.top_k, p.max_new_tokens)
        for p in (evaluation_params(config, t) for t in (plain, own))
    ]
    assert found == [(0.5, 1.0, 7, 9), (0.0, 0.5, 0, 3)]
    assert evaluation_params(config) == evaluation_params(config, plain)
