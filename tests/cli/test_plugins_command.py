"""`slime plugins list | show | check | hooks`: metadata alone, or a process for each plugin; a broken one breaks no other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.hookspecs import HOOKS

pytestmark = pytest.mark.integration

GOOD = """import slime_core
from pydantic import BaseModel, Field

class Options(BaseModel, extra="forbid", frozen=True):
    limit: int = Field(3, description="How many.")

@slime_core.hookimpl
def slime_options():
    return Options

@slime_core.hookimpl
def slime_reward(group, ctx):
    return [1.0 for sample in group.samples]
"""

STATE = """
class Holder:
    def state(self):
        return {}
    def load(self, state):
        pass

@slime_core.hookimpl
def slime_state():
    return Holder()
"""


def test_list_is_a_table_of_metadata(cli, install_plugin):
    install_plugin("geo", "raise RuntimeError('never imported')", distribution="slime-geo", version="0.3.1")
    done = cli("plugins", "list")
    assert done.code == 0
    header, row = [line.split() for line in done.out.splitlines() if "geo" in line or "Name" in line][:2]
    assert header == ["Name", "Version", "Distribution", "Target"]
    assert row == ["geo", "0.3.1", "slime-geo", "geo_plugin_module"]


def test_the_json_of_list_is_a_promise(cli, install_plugin):
    install_plugin("geo", "", distribution="slime-geo", version="0.3.1")
    rows = {row["name"]: row for row in json.loads(cli("plugins", "list", "--json").out)["plugins"]}
    assert rows["geo"] == {
        "name": "geo",
        "version": "0.3.1",
        "distribution": "slime-geo",
        "target": "geo_plugin_module",
        "conflicts": [],
    }


def test_list_imports_no_plugin_and_nothing_heavy(install_plugin):
    site = install_plugin("geo", "raise RuntimeError('imported at list')")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\nfrom slime_cli.main import main\n"
        "assert main(['plugins', 'list']) == 0\n"
        "print([m for m in ('numpy', 'torch', 'ray', 'transformers', 'pydantic', 'geo_plugin_module') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.nightly  # a process for each package of the house
def test_list_with_hooks_shows_them_or_that_the_plugin_is_broken(cli, install_plugin):
    install_plugin("good", GOOD)
    install_plugin("bad", "import no_such_package")
    install_plugin("deadly", "import os; os._exit(3)")
    rows = {r["name"]: r for r in json.loads(cli("plugins", "list", "--hooks", "--json").out)["plugins"]}
    assert rows["good"]["hooks"] == ["slime_options", "slime_reward"]
    assert rows["bad"]["error"]["code"] == "PLG50"
    assert "code 3" in rows["deadly"]["error"]["what"]


def test_two_distributions_of_one_name_are_listed_with_a_warning(cli, install_plugin):
    install_plugin("twin", "", distribution="slime-twin")
    install_plugin("twin", "", distribution="other-twin")
    assert "'twin' is declared by slime-twin and other-twin" in cli("plugins", "list").out
    done = cli("plugins", "show", "twin")
    assert done.code == 4
    assert "PLG52" in done.err


def test_show_tells_hooks_options_and_recipes(cli, install_plugin):
    install_plugin("geo", GOOD)
    facts = json.loads(cli("plugins", "show", "geo", "--json").out)
    assert facts["hooks"] == ["slime_options", "slime_reward"]
    assert facts["options"] == [{"key": "plugin.geo.limit", "type": "int", "default": "3", "description": "How many."}]
    assert facts["recipes"] == {}
    text = cli("plugins", "show", "geo").out
    assert "plugin.geo.limit" in text
    assert "slime_reward" in text


def test_show_of_a_broken_plugin_says_why_and_exits_with_4(cli, install_plugin):
    install_plugin("geo", "import no_such_package")
    done = cli("plugins", "show", "geo")
    assert done.code == 4
    assert "module 'no_such_package' is missing" in done.out


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_plugin_that_is_not_installed_gets_the_nearest_name(cli, install_plugin, command):
    install_plugin("kernelbench", GOOD)
    done = cli("plugins", command, "kernelbnch")
    assert done.code == 4
    assert "PLG51" in done.err
    assert "did you mean 'kernelbench'?" in done.err
    assert "install the package that provides it" in done.err


def test_check_keeps_a_record_of_every_promise(cli, install_plugin):
    install_plugin("geo", GOOD)
    done = cli("plugins", "check", "geo", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["ok"] is True
    status = {finding["name"]: finding["status"] for finding in answer["findings"]}
    assert status["import"] == status["options"] == status["rewards"] == "ok"
    assert (status["state"], status["API"]) == ("skip", "warn")
    assert "all promises kept, 1 warning\n" in cli("plugins", "check", "geo").out
    install_plugin("new", "slime_api = 1\n" + GOOD)
    done = cli("plugins", "check", "new")
    assert ("API" in done.out, done.out.endswith("all promises kept\n")) == (False, True)


def test_the_environment_of_the_documentation_keeps_its_promises(cli, tmp_path):
    """Its rewards read what its episodes leave."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*def episode[^`]*)```", page)
    (tmp_path / "guess.py").write_text(code)
    done = cli("plugins", "check", str(tmp_path / "guess.py"))
    assert (done.code, done.out.endswith("all promises kept\n")) == (0, True), done.out


BROKEN = {
    "import": ("import no_such_package", "PLG50"),
    "hook name": (GOOD.replace("slime_reward", "slime_rewards"), "PLG54"),
    "signature": (GOOD.replace("(group, ctx)", "(groups)"), "PLG53"),
    "API": ("slime_api = 7\n" + GOOD, "PLG55"),
    "length": (GOOD.replace("[1.0 for sample in group.samples]", "[1.0]"), "PLG59"),
    "nan": (GOOD.replace("1.0 for", "float('nan') for"), "PLG58"),
    "raises on an empty answer": (GOOD.replace("1.0 for", "sample.response[0] for"), "IndexError"),
    "state": (GOOD + STATE.replace("{}", "{'seen': object()}"), "PLG64 the state of plugin 'geo' cannot be saved"),
    "exits": ("import os\nos._exit(9)\n", "code 9"),
    "dies": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "code -9"),
}
WITNESSES = ("import", "signature", "nan", "dies")  # a process each: the others are tried at night


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind not in WITNESSES)) for kind in BROKEN]
)
def test_check_of_a_broken_plugin_exits_with_4_and_says_why(cli, install_plugin, kind):
    source, told = BROKEN[kind]
    install_plugin("geo", source)
    done = cli("plugins", "check", "geo")
    assert done.code == 4
    assert told in done.out
    assert "1 broken" in done.out


def test_hooks_lists_every_hook_and_shows_one_with_its_example(cli):
    rows = json.loads(cli("plugins", "hooks", "--json").out)["hooks"]
    assert [row["name"] for row in rows] == list(HOOKS)
    assert all(row["text"] for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["slime_reward"]["signature"] == "slime_reward(group, ctx)"
    assert by_name["slime_reward"]["replaces"] == [
        "--custom-rm-path",
        "--group-rm",
        "--custom-reward-post-process-path",
    ]
    text = cli("plugins", "hooks")
    assert all(hook in text.out for hook in HOOKS)
    one = cli("plugins", "hooks", "slime_filter")
    assert "@slime_core.hookimpl" in one.out
    wrong = cli("plugins", "hooks", "slime_filtr")
    assert wrong.code == 4
    assert "did you mean 'slime_filter'?" in wrong.err


def test_a_broken_plugin_leaves_list_and_other_plugins_alone(cli, install_plugin):
    install_plugin("bad", "raise SystemExit(9)")
    install_plugin("good", GOOD)
    assert cli("plugins", "list").code == 0
    assert cli("plugins", "check", "good").code == 0


def test_looking_at_a_plugin_that_never_ends_gives_up(install_plugin, monkeypatch):
    from slime_cli.plugin_probe import in_process

    install_plugin("slow", "import threading; threading.Event().wait(60)")
    answer = in_process("slime_cli.plugin_probe", "slow", timeout=1)
    assert "longer than 1 s" in answer["error"]["what"]
