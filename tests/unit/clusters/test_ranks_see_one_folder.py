"""Ranks that do not share the run directory are refused before any of them builds a model."""

import asyncio
import os

import pytest
from forked_channel import start_forked

from slime_core.clusters.ranks import RankTrainer
from slime_core.config.load import load_config
from slime_core.errors import StorageError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration


class OtherView(RankTrainer):
    """Rank 1 has another folder under the run directory's name, as on a machine with another mount."""

    other = None

    def _seen_by(self, number):
        return self.other if number == 1 else super()._seen_by(number)


def test_a_rank_that_sees_another_folder_is_named(tmp_path):
    path = tiny_model(tmp_path / "model", weights=False)
    config = load_config(
        None, ["--hf-checkpoint", str(path), "--init-weights", "random", "--device", "cpu", "--cpu-threads", "1"]
    )
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    run_dir = tmp_path / "run"
    ranks = OtherView(config, load_plugins(config), world=2, run_dir=run_dir, start=start_forked)
    ranks.other = tmp_path / "other"

    async def run():
        async with ranks:
            raise AssertionError("two folders were taken for one")

    with pytest.raises(StorageError, match="STO200") as caught:
        asyncio.run(run())
    assert "rank 1" in caught.value.what
    assert str(tmp_path / "other") in caught.value.where
    assert [p for p in run_dir.iterdir() if p.name != "log"] == []
    for pid in [rank.channel.pid for rank in ranks._ranks]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
