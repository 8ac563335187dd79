"""A broken backend package takes nothing down that does not name it."""

import pytest

pytestmark = pytest.mark.integration

SOURCES = {
    "import": "import no_such_package",
    "exit": "raise SystemExit(3)",
    "API": "slime_api = 99",
    "hook": "import slime_core\n@slime_core.hookimpl\ndef slime_engine():\n    raise ValueError('no')\n",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_help_lists_and_runs_without_it_go_on(cli, own, install_plugin, source):
    install_plugin("broken", source)
    assert cli("--help").code == 0
    assert "broken" in cli("plugins", "list").out
    assert cli("config", "keys").code == 0
    assert cli("run", *own.flags, "--dry-run").code == 0
    done = cli("run", *own.flags, "--rollout-engine", "broken", "--dry-run")
    assert done.code == 4, done.err
    assert "dist-broken" in done.err
    assert "rollout.rollout_engine" in done.err
