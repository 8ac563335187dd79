"""Resumes of runs with plugins and secrets: what comes back, what must be given again, what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from slime_cli.failure import CliSession
from slime_cli.resume import load_saved
from slime_core.config.dump import REDACTED

pytestmark = pytest.mark.integration


KEEPING = """
import slime_core

class Kept:
    told = 0
    def state(self):
        return {{"told": self.told}}
    def load(self, state):
        {load}

kept = Kept()

@slime_core.hookimpl
def slime_state():
    return kept

@slime_core.hookimpl
def slime_step_done(report, ctx):
    kept.told += 1
    print("told", kept.told)
"""


OPTIONS = """
import pydantic
import slime_core

class Options(pydantic.BaseModel):
    api_key: str = ""
    endpoint: str = ""

@slime_core.hookimpl
def slime_options():
    return Options

@slime_core.hookimpl
def slime_step_done(report, ctx):
    assert ctx.options.api_key == "correct-horse"
"""


def info(path):
    return json.loads((Path(path) / "run.json").read_text())


def test_an_edited_function_is_refused_unless_forced(cli, own, halted):
    with (own.path / "judge.py").open("a") as file:
        file.write("\n# better\n")
    done = cli("run", "--resume", halted)
    assert done.code == 4
    assert "error PLG65" in done.err
    assert f"{own.path}/judge.py: its source files changed" in done.err
    assert "--force-key plugins" in done.err
    forced = cli("run", "--resume", halted, "--force-key", "plugins")
    assert forced.code == 0, forced.err
    assert "its source files changed" in forced.err


def upgrade(site, load):
    """Another version of the plugin in its place, as pip would put it."""
    (site / "keeping_plugin_module.py").write_text(KEEPING.format(load=load))
    (site / "dist_keeping-1.0.dist-info").rename(site / "dist_keeping-2.0.dist-info")
    metadata = site / "dist_keeping-2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))


def forget_module():
    import sys

    sys.modules.pop("keeping_plugin_module", None)


@pytest.fixture
def kept(cli, own, install_plugin, monkeypatch):
    """A run with a plugin that keeps state, stopped at version 2; and where the plugin lies."""
    site = install_plugin("keeping", KEEPING.format(load="self.told = state['told']"))
    monkeypatch.setenv("HALT", "main/4-0")
    done = cli("run", *own.flags, "--plugin", "keeping", "--run-dir", "cut")
    assert (done.code, done.out) == (75, "told 1\ntold 2\n"), done.err
    monkeypatch.delenv("HALT")
    forget_module()
    return Path("cut").absolute(), site


def test_a_plugins_state_comes_back(cli, kept):
    path, _ = kept
    done = cli("run", "--resume", path)
    assert (done.code, done.out) == (0, f"told 3\ntold 4\n{path}\n"), done.err


def test_an_upgraded_plugin_is_refused_with_both_versions_and_migrates_when_forced(cli, kept):
    """`load` gets what the old version saved."""
    path, site = kept
    upgrade(site, "self.told = 100 * state['told']")
    done = cli("run", "--resume", path)
    assert done.code == 4
    assert "error PLG65" in done.err
    assert "plugin keeping: dist-keeping==1.0 was saved, dist-keeping==2.0 is installed" in done.err
    forget_module()
    forced = cli("run", "--resume", path, "--force-key", "plugins")
    assert (forced.code, forced.out) == (0, f"told 201\ntold 202\n{path}\n"), forced.err
    assert info(path)["plugins"] == {"keeping": "dist-keeping==2.0"}


def test_a_removed_plugin_is_refused_by_name(cli, kept):
    """A plugin that is gone."""
    path, site = kept
    shutil.rmtree(site / "dist_keeping-1.0.dist-info")
    done = cli("run", "--resume", path)
    assert done.code == 4
    assert "error PLG51" in done.err
    assert "keeping" in done.err


def test_a_secret_must_come_back_by_flag_or_variable(cli, own, install_plugin, monkeypatch):
    """Secrets are redacted in config.toml, so a resume needs them again."""
    install_plugin("keyed", OPTIONS)
    monkeypatch.setenv("HALT", "main/4-0")
    flags = ("--plugin", "keyed", "--run-dir", "cut")
    assert cli("run", *own.flags, *flags, "plugin.keyed.api_key=correct-horse").code == 75
    monkeypatch.delenv("HALT")
    assert "correct-horse" not in Path("cut/config.toml").read_text() + Path("cut/run.json").read_text()
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "error CFG09" in done.err
    assert "plugin.keyed.api_key" in done.err
    wrong = cli("run", "--resume", "cut", "plugin.keyed.api_key=other")
    assert wrong.code == 4, "the plugin sees the key that was given"
    again = cli("run", "--resume", "cut", "plugin.keyed.api_key=correct-horse")
    assert again.code == 0, again.err


def test_a_secret_from_a_variable_is_read_from_it_again(cli, own, install_plugin, monkeypatch, tmp_path):
    install_plugin("keyed", OPTIONS)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('plugins = ["keyed"]\n[plugin.keyed]\napi_key = "${MY_API_KEY}"\nendpoint = "${HIDDEN_TOKEN}"\n')
    monkeypatch.setenv("HALT", "main/4-0")
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    monkeypatch.setenv("HIDDEN_TOKEN", "battery-staple")
    assert cli("run", recipe, *own.flags, "--run-dir", "cut").code == 75
    monkeypatch.delenv("HALT")
    names = {"plugin.keyed.api_key": "${MY_API_KEY}", "plugin.keyed.endpoint": "${HIDDEN_TOKEN}"}
    assert info("cut")["references"] == names
    monkeypatch.delenv("MY_API_KEY")
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "export MY_API_KEY=..." in done.err
    monkeypatch.setenv("MY_API_KEY", "correct-horse")
    again = cli("run", "--resume", "cut")
    assert again.code == 0, again.err
    assert "CFG10" not in again.err
    everything = "".join(
        p.read_text(errors="replace")
        for p in Path("cut").rglob("*")
        if p.suffix in (".toml", ".json", ".jsonl", ".txt")
    )
    assert "correct-horse" not in everything
    assert "battery-staple" not in everything, "not in MANIFEST.json either"
    assert REDACTED in Path("cut/config.toml").read_text()


@pytest.mark.parametrize("secret", ["1e5", 'a "quoted" $one'])
def test_a_secret_of_servers_comes_back_from_the_variable_of_its_name(cli, own, monkeypatch, secret):
    """[sglang.env] of a run is for other processes, and never written down."""
    monkeypatch.setenv("HALT", "main/4-0")
    word = f"sglang.env.HF_TOKEN={json.dumps(secret)}"
    assert cli("run", *own.flags, "--run-dir", "cut", word, "sglang.env.PLAIN=2").code == 75
    monkeypatch.delenv("HALT")
    written = Path("cut/config.toml").read_text() + Path("cut/run.json").read_text()
    assert secret not in re.sub(r"\b[0-9a-f]{16,}\b", "", written)  # a hash may have it within
    done = cli("run", "--resume", "cut")
    assert done.code == 2
    assert "error CFG09" in done.err
    assert "sglang.env.HF_TOKEN" in done.err
    assert "export HF_TOKEN=..." in done.err
    monkeypatch.setenv("HF_TOKEN", secret)
    settings = load_saved(Path("cut"), [], CliSession(argv=["run", "--resume", "cut"]))
    settings.plugins.close()  # its functions by path had slime's modules served in this process
    assert settings.config.sglang["env"] == {"HF_TOKEN": secret, "PLAIN": 2}
    assert secret in settings.loaded.secrets
    if secret == "1e5":
        again = cli("run", "--resume", "cut")
        assert again.code == 0, again.err
        assert secret not in "".join(p.read_text() for p in Path("cut").rglob("*") if p.suffix in (".toml", ".json"))
