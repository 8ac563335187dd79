"""The plugin as slime sees it."""

import subprocess
import sys

import pytest

from slime_chat import plugin
from slime_core.testing.plugins import check_plugin

pytestmark = pytest.mark.integration


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("chat") if finding.status in ("fail", "warn")] == []


def test_the_plugin_loads_neither_torch_nor_transformers():
    code = "import sys, slime_chat.plugin; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_doctor_says_where_agents_connect_and_names_an_address_that_is_not_there(monkeypatch):
    assert plugin.check_loopback().found == "agents can connect to 127.0.0.1"
    monkeypatch.setattr(plugin, "LOOPBACK", "192.0.2.1")  # reserved for documentation: no machine has it
    result = plugin.check_loopback()
    assert (result.status, result.fix) == ("fail", "ip link set lo up")
    assert "192.0.2.1" in result.found
