"""The environments of these tests, on the path of the processes that run them."""

import os
from pathlib import Path

import pytest

ENVIRONMENTS = sorted(path for path in (Path(__file__).parent / "environments").iterdir() if path.is_dir())


@pytest.fixture
def environment_path(monkeypatch):
    """The packages beside, as if they were installed."""
    path = os.pathsep.join([*map(str, ENVIRONMENTS), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    return path
