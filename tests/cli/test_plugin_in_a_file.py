"""A plugin in one Python file, named by its path: by a flag, by a recipe beside it, and to the commands that look."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

LENGTH = """
import slime_core
from pydantic import BaseModel

slime_api = 1


class Options(BaseModel, extra="forbid", frozen=True):
    bonus: float = 0.0


@slime_core.hookimpl
def slime_options():
    return Options


@slime_core.hookimpl
def slime_reward(group, ctx):
    return [len(sample.response) % 2 + ctx.options.bonus for sample in group.samples]
"""


@pytest.fixture
def length():
    """The plugin `length` in the current folder."""
    path = Path("length.py").absolute()
    path.write_text(LENGTH)
    return path


def test_a_run_takes_it_by_a_flag_and_goes_on_with_it(cli, own, length):
    flags = [flag for flag in own.flags if "judge.py" not in str(flag) and flag != "--custom-rm-path"]
    done = cli(
        "run", *flags, "--plugin", "./length.py", "--bonus", "2", "--num-rollout", "1", "--run-dir", "made", "--json"
    )
    assert done.code == 0, done.err
    info = json.loads(Path("made/run.json").read_text())
    assert info["plugins"] == {"length": str(length)}
    assert 2 <= json.loads(done.out)["metrics"]["reward/mean"] <= 3
    assert cli("run", "--resume", "made", "--num-rollout", "2").code == 0


def test_a_recipe_names_it_beside_itself(cli, own, length):
    folder = Path("elsewhere")
    folder.mkdir()
    length.rename(folder / length.name)
    model, rows = own.path / "model", own.path / "my.jsonl"
    (folder / "recipe.toml").write_text(
        f'plugins = ["length.py"]\nrollout.hf_checkpoint = "{model}"\ndata.prompt_data = "{rows}"\n'
        'data.input_key = "question"\nplugin.length.bonus = 1.5\n'
    )
    done = cli("config", "check", "elsewhere/recipe.toml", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["plugins"] == ["length"]


def test_a_plugin_in_a_file_is_checked_and_shown_by_its_path(cli, length):
    done = cli("plugins", "check", "length.py")
    assert (done.code, "all promises kept\n" in done.out) == (0, True), done.out + done.err
    done = cli("plugins", "show", "./length.py")
    assert (done.code, "plugin.length.bonus" in done.out) == (0, True)


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("./lenght.py", "PLG51", "did you mean 'length.py'?"),
        ("./folder", "PLG51", "pip install -e "),
        ("./broken.py", "PLG50", "module 'no_such_module' is missing"),
        ("./two-words.py", "PLG51", "is not a name of a Python module"),
    ],
    ids=["no such file", "a folder", "import", "name"],
)
def test_a_path_that_leads_to_no_plugin_says_why(cli, length, path, code, text):
    Path("folder").mkdir()
    Path("broken.py").write_text("import no_such_module\n")
    Path("two-words.py").write_text(LENGTH)
    done = cli("run", "--plugin", path, "--dry-run")
    assert done.code == 4
    assert code in done.err
    assert text in done.err
    assert "pip install slime-" not in done.err


def test_two_plugins_of_one_name_are_refused(cli, length):
    Path("more").mkdir()
    Path("more/length.py").write_text(LENGTH)
    done = cli("config", "check", "--plugin", "length.py", "--plugin", "more/length.py", "--hf-checkpoint", ".")
    assert (done.code, "PLG52" in done.err) == (4, True), done.err
