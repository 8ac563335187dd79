"""Tools as modules."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools" / "bench"


@pytest.fixture
def tool(monkeypatch):
    """Import a tool by name, with what it imports from beside it; the next test imports anew."""
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or "/").parent == TOOLS:
            del sys.modules[name]
