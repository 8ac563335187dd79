"""The plugin keeps the core's contract, loads nothing heavy, and ends what it began."""

import subprocess
import sys

import pytest

from slime_core.testing.plugins import check_plugin

pytestmark = pytest.mark.unit


def test_the_plugin_keeps_its_contract():
    found = check_plugin("kernelbench")
    assert [f for f in found if f.status not in ("ok", "skip")] == []
    kept = {f.name for f in found if f.status == "ok"}
    assert {"import", "options", "command", "prompts", "generation", "rewards", "names"} <= kept


def test_loading_it_and_its_options_and_its_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from slime_core.plugins.load import load_plugin\n"
        "found = load_plugin('kernelbench')\n"
        "found.target.slime_options()()\n"
        "found.target.slime_command()\n"
        "heavy = {'torch', 'triton', 'transformers', 'httpx', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
