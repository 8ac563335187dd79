"""Torch is told to put large tensors on huge pages before it is imported, unless the user has said otherwise."""

import os

import pytest

from slime_cli.main import main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_a_command_asks_for_huge_pages_unless_the_user_did(monkeypatch, capsys, before, after):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", before or "")
    if before is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    assert main(["--help"]) == 0
    assert "slime" in capsys.readouterr().out
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == after
