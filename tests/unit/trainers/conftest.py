"""A trainer over a small model folder."""

import pytest
from trainer_bench import Bench

from slime_core.testing import tiny_model


@pytest.fixture
def bench(tmp_path):
    """Make a Bench: ``bench(family="qwen3", tied=False, **train)``."""
    made = []

    def make(family="qwen3", tied=False, folder=None, **train):
        name = f"model-{family}-{tied}"
        folder = folder or (
            tmp_path / name if (tmp_path / name).exists() else tiny_model(tmp_path / name, family, tied=tied)
        )
        made.append(Bench(folder, **train))
        return made[-1]

    yield make
    for one in made:
        one.thread.close()
