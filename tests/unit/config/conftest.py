"""A recipe in a folder of its own, and what the loader says about it."""

import pytest

from slime_core.config.load import read
from slime_core.errors import ConfigError


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write recipe.toml (text or bytes) in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text="", name="recipe.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def refused():
    """The error that a recipe and flags end in."""

    def load(path, *flags, **options):
        with pytest.raises(ConfigError) as caught:
            read(path, flags, **options)
        return caught.value

    return load
