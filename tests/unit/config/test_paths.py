"""Relative paths: a recipe's from its folder, the command line's from the cwd; what is missing is named in full."""

import pytest

from slime_core.config.load import load_config, read

pytestmark = pytest.mark.unit


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for folder in ("recipes", "recipes/model", "work", "work/model"):
        (tmp_path / folder).mkdir()
    for file in ("recipes/rows.jsonl", "recipes/reward.py", "work/rows.jsonl", "work/reward.py"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def recipe_in(tree, text):
    path = tree / "recipes" / "r.toml"
    path.write_text(text)
    return path


def test_a_recipes_paths_start_at_its_folder(tree):
    config = load_config(
        recipe_in(
            tree,
            "[data]\nprompt_data = 'rows.jsonl@[0:3]'\n[rollout]\nhf_checkpoint = './model'\ncustom_config_path = 'rows.jsonl'\n"
            "[reward]\ncustom_rm_path = 'reward.py:fn'\n[eval]\neval_prompt_data = ['held', '../recipes/rows.jsonl']\n"
            "eval_tasks = [{name = 'a', prompt_data = 'rows.jsonl', reward = 'reward.py:fn'}]\n",
        )
    )
    base = tree / "recipes"
    assert config.data.prompt_data == f"{base}/rows.jsonl@[0:3]"
    assert config.rollout.custom_config_path == f"{base}/rows.jsonl"
    assert config.rollout.hf_checkpoint == f"{base}/model"
    assert config.reward.custom_rm_path == f"{base}/reward.py:fn"
    assert config.eval.eval_prompt_data == ("held", f"{base}/rows.jsonl")
    assert config.eval.eval_tasks[0].prompt_data == f"{base}/rows.jsonl"
    assert config.eval.eval_tasks[0].reward == f"{base}/reward.py:fn"


def test_the_command_lines_paths_start_at_the_cwd(tree):
    flags = ["--prompt-data", "rows.jsonl", "--hf-checkpoint", "model", "--custom-rm-path", "reward.py:fn"]
    config = load_config(recipe_in(tree, "[data]\nprompt_data = 'rows.jsonl'\n"), flags)
    base = tree / "work"
    assert config.data.prompt_data == f"{base}/rows.jsonl"
    assert config.rollout.hf_checkpoint == f"{base}/model"
    assert config.reward.custom_rm_path == f"{base}/reward.py:fn"


def test_a_split_of_a_folder_is_a_path_too(tree):
    base = tree / "recipes"
    config = load_config(recipe_in(tree, "[data]\nprompt_data = 'model:test@[0:3]'\n"))
    assert config.data.prompt_data == f"{base}/model:test@[0:3]"
    assert load_config(None, ["--prompt-data", f"{base}/model:test"]).data.prompt_data == f"{base}/model:test"
    config = load_config(recipe_in(tree, "[data]\nprompt_data = 'model#easy:test'\n"))
    assert config.data.prompt_data == f"{base}/model#easy:test"


def test_names_that_are_no_paths_stay_names(tree):
    flags = ["--prompt-data", "hub/rows", "--hf-checkpoint", "Qwen/Qwen3-0.6B", "--custom-rm-path", "pkg.mod:fn"]
    config = load_config(None, flags)
    assert config.data.prompt_data == "hub/rows"
    assert config.rollout.hf_checkpoint == "Qwen/Qwen3-0.6B"
    assert config.reward.custom_rm_path == "pkg.mod:fn"


@pytest.mark.parametrize(
    ("flags", "key", "file"),
    [
        pytest.param(["--prompt-data", "gone.jsonl"], "data.prompt_data", "work/gone.jsonl", id="rows"),
        pytest.param(["--prompt-data", "../x/gone.parquet@[0:9]"], "data.prompt_data", "x/gone.parquet", id="slice"),
        pytest.param(["--hf-checkpoint", "gone"], "rollout.hf_checkpoint", "work/gone", id="model"),
        pytest.param(["--hf-checkpoint", "./a/b"], "rollout.hf_checkpoint", "work/a/b", id="model path"),
        pytest.param(["--ref-load", "/nowhere/ref"], "train.ref_load", "/nowhere/ref", id="reference model"),
        pytest.param(["--teacher-load", "gone"], "train.teacher_load", "work/gone", id="teacher model"),
        pytest.param(
            ["--critic-load", "./gone", "--advantage-estimator", "ppo"],
            "train.critic_load",
            "work/gone",
            id="critic model",
        ),
        pytest.param(["--custom-rm-path", "gone.py:fn"], "reward.custom_rm_path", "work/gone.py", id="function"),
        pytest.param(
            ["--eval-prompt-data", "a", "gone.jsonl"], "eval.eval_prompt_data[1]", "work/gone.jsonl", id="eval"
        ),
    ],
)
def test_a_missing_file_is_named_with_its_absolute_path_and_the_cwd(tree, refused, flags, key, file):
    error = refused(None, *flags)
    assert error.code == "CFG05"
    assert key in error.what
    assert str(tree / file) in error.why
    assert f"the current folder is {tree / 'work'}" in error.why
    assert f"correct the path in {key}" in error.fix
    assert error.where == f"command line: {flags[0]}"


def test_every_missing_file_is_named_at_once_with_its_line(tree, refused):
    path = recipe_in(tree, "[data]\nprompt_data = 'a.jsonl'\n[[stage]]\nname = 's'\ncustom_rm_path = 'b.py:fn'\n")
    error = refused(path)
    assert str(tree / "recipes/a.jsonl") in error.why
    assert str(tree / "recipes/b.py") in error.why
    assert error.where == f"{path}:2, {path}:5"


def test_an_old_run_can_be_read_after_its_files_are_gone(tree):
    path = recipe_in(tree, "[data]\nprompt_data = '/gone/rows.jsonl'\n[rollout]\nrollout_engine = 'sglang'\n")
    assert read(path, check=False).config.data.prompt_data == "/gone/rows.jsonl"
