"""docs/plugins.md and docs/compat.md say what the code does."""

import re
from pathlib import Path

import pytest

from slime_core.compat.shapes import SHAPES
from slime_core.hookspecs import HOOKS
from slime_core.plugins.load import load_plugin

pytestmark = pytest.mark.integration

DOCS = Path(__file__).parents[2] / "docs"


def test_the_hooks_of_the_page_are_what_the_command_prints(cli):
    page = (DOCS / "plugins.md").read_text()
    assert page.endswith(cli("plugins", "hooks", "--markdown").out.rstrip() + "\n"), (
        "paste slime plugins hooks --markdown"
    )


def test_the_smallest_plugin_of_the_page_loads(install_plugin):
    page = (DOCS / "plugins.md").read_text()
    source = re.search(r"## The smallest plugin.*?```python\n(.*?)```", page, re.DOTALL).group(1)
    install_plugin("mine", source)
    assert set(load_plugin("mine").hooks) == {"slime_reward"}


def test_every_function_by_path_is_on_the_page_with_its_arguments():
    page = (DOCS / "compat.md").read_text()
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert {flag.replace("-", "_") for flag in rows} == set(SHAPES)
    for key, (positional, keywords) in SHAPES.items():
        shown = rows[key.replace("_", "-")]
        assert all(name in shown for name in (*positional, *keywords)), (key, shown)


def test_every_flag_that_a_hook_replaces_is_a_function_by_path_or_named_apart():
    apart = {"custom-config-path", "group-rm", "rm-type", "custom-model-provider-path"}
    flags = {flag for info in HOOKS.values() for flag in info.replaces}
    own = {"run-done-path"}  # THUDM/slime has none
    assert flags - apart == {key.replace("_", "-") for key in SHAPES} - own
