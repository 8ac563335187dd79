"""A run directory as plain data: figures, times, settings, differences, and what is damaged."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zlib
from pathlib import Path

import pytest
from PIL import Image

from slime_core.ledger.codec import unpack
from slime_core.ledger.ledger import SqliteLedger
from slime_core.media.references import data_uri
from slime_core.report.rundir import RunDir
from slime_core.types import Group, Prompt, Sample
from slime_report.data import notices_of, overview, unique_names
from slime_report.samples import SampleBook

pytestmark = pytest.mark.unit

STEP = '{"kind": "step", "version": %d, "stage": "main", "of": 3, "metrics": %s, "seconds": {"train": 0.5}}\n'


def make_run(path: Path, lines: str, config: str = "[train]\nlr = 0.1\n") -> RunDir:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config)
    (path / "metrics.jsonl").write_text(lines)
    (path / "run.json").write_text(json.dumps({"status": "finished", "plugins": {"mine": "mine==1"}}))
    return RunDir.open(path)


def test_steps_and_evaluations_become_columns_and_a_half_line_is_stated(tmp_path: Path) -> None:
    lines = STEP % (1, '{"loss": 2.0, "kl": null}') + STEP % (2, '{"loss": 1.123456789}')
    lines += '{"kind": "eval", "version": 2, "name": "held", "metrics": {"reward/mean": 1.0}}\n{"kind": "st'
    (run,) = overview([make_run(tmp_path / "a", lines)])["runs"]
    assert run["steps"]["version"] == [1, 2]
    assert run["steps"]["metrics"] == {"kl": [None, None], "loss": [2, 1.123457]}
    assert run["steps"]["seconds"] == {"train": [0.5, 0.5]}
    assert run["evaluations"]["held"]["metrics"] == {"reward/mean": [1]}
    assert run["stages"] == [{"name": "main", "first": 1, "last": 2}]
    assert (run["status"], run["of"]) == ("finished", 3)
    assert run["notices"][0] == "1 of the lines of metrics.jsonl cannot be read and are left out"


def test_differences_of_runs_are_their_keys_and_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one = make_run(tmp_path / "x" / "run-0", "", "[train]\nlr = 0.1\n[[stage]]\nname = 'a'\nlr = 1.0\n")
    other = make_run(
        tmp_path / "y" / "run-0", "", "[train]\nlr = 0.1\ntis_clip = inf\n[[stage]]\nname = 'a'\nlr = 2.0\n"
    )
    facts = overview([one, other])
    assert facts["differences"] == [
        {"key": "stage.a.lr", "values": [1.0, 2.0]},
        {"key": "train.tis_clip", "values": [None, "inf"]},
    ]
    assert [run["name"] for run in facts["runs"]] == ["x/run-0", "y/run-0"]
    assert unique_names(["/a/x-0", "/b/x-0", "/b/y-0"]) == ["a/x-0", "b/x-0", "y-0"]


def test_a_sample_shows_small_pictures_and_names_those_that_are_gone_or_too_large(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "", "[data]\nmax_image_pixels = 200_000\n")
    photograph, lost, large = (tmp_path / name for name in ("a.png", "lost.png", "large.png"))
    for path, width in ((photograph, 600), (lost, 300), (large, 900)):
        Image.new("RGB", (width, 300), (200, 10, 10)).save(path)
    stored = data_uri(photograph.read_bytes())
    inputs = {"images": [str(photograph), str(lost), str(large), stored], "videos": [[str(photograph)]]}
    samples = [Sample(id=f"main/0-{j}", rollout_id=j, group_index=0, multimodal_inputs=inputs) for j in (0, 1)]
    group = Group(prompt=Prompt(id="main/0"), samples=samples, rollouts={0: [0], 1: [1]})

    async def store() -> None:
        ledger = SqliteLedger(run.path)
        await ledger.issue([group])
        await ledger.finish(group)
        await ledger.close()

    asyncio.run(store())
    moved = lost.rename(tmp_path / "moved.png")
    book = SampleBook(run)
    fields, _ = unpack(zlib.decompress(book.page([0])))
    assert [sample["pictures"] for sample in fields["samples"]] == [[0, 1, 2, 0, 0]] * 2
    small, gone, too_large = fields["pictures"]
    assert Image.open(io.BytesIO(base64.b64decode(small.partition(",")[2]))).size == (224, 112)
    assert "lost.png cannot be decoded" in gone
    assert "large.png is too large: 900 x 300 pixels" in too_large
    moved.rename(lost)
    fields, _ = unpack(zlib.decompress(book.page([0])))
    assert fields["pictures"][1].startswith("data:image/jpeg")  # only what could be read is kept
    assert sum(map(len, book._thumbnails.pictures)) == 3 * 16  # and never a whole file as a key


@pytest.mark.parametrize(("use_tis", "text"), [(True, "use_tis weighed tokens"), (False, "use_tis was off")])
def test_rollouts_in_fp8_are_named_with_their_correction(use_tis: bool, text: str) -> None:
    config = {"rollout.rollout_quantization": "fp8", "train.use_tis": use_tis}
    (notice,) = notices_of(config, 0, [{}], {"trained": 1})
    assert "weights in fp8" in notice
    assert text in notice
    assert notices_of(config | {"rollout.rollout_quantization": "auto"}, 0, [{}], {"trained": 1}) == []
