"""Folders of a small family, in blocks of a few rows."""

import pytest

from slime_convert import rows
from slime_megatron.convert import dist_writing


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks, chunks and files of a few rows: every tensor of a conversion takes several of each."""
    monkeypatch.setattr(rows, "BLOCK", 100)
    monkeypatch.setattr(dist_writing, "CHUNK", 900)
    monkeypatch.setattr(dist_writing, "FILE", 8000)


@pytest.fixture
def source(tmp_path):
    """A model folder of the family in `small_family`."""
    from small_family import write_folder

    return write_folder(tmp_path / "hf")
