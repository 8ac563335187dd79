"""Rows of Geometry3K's own format become rows of the recipe, and the recipe trains any model of pictures."""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from slime_core.testing.vision import tiny_vision_model

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # as a run does for a function's file

import geometry_rows  # noqa: E402

TRIANGLES = ((3, 4, 5), (6, 8, 10), (5, 12, 13), (8, 15, 17))
SMALL = (
    *("--rollout-engine", "local", "cluster.device=cpu", "cluster.colocate=false", "train.dtype=float32"),
    *("rollout.rollout_max_response_len=8", "stage.grpo.num_rollout=2", "stage.grpo.rollout_batch_size=2"),
    *("stage.grpo.n_samples_per_prompt=4", "stage.grpo.lr=1e-3"),
)


def triangle(legs):
    """A right triangle and the lengths of its legs."""
    picture = Image.new("RGB", (90 + legs[0], 70), "white")
    pen = ImageDraw.Draw(picture)
    pen.polygon([(10, 60), (80, 60), (10, 10)], outline="black")
    pen.text((40, 61), str(legs[0]), fill="black")
    pen.text((1, 30), str(legs[1]), fill="black")
    return picture


@pytest.fixture
def folder(tmp_path):
    """A data set as the hub has it: Parquet files of two splits, pictures as bytes."""
    import datasets

    features = datasets.Features(
        images=datasets.Sequence(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
    )
    records = [
        {"images": [triangle(sides)], "problem": "<image>Find the longest side.", "answer": str(sides[2])}
        for sides in TRIANGLES
    ]
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        part = datasets.Dataset.from_list(records, features=features)
        part.to_parquet(tmp_path / "set" / f"{split}-00000-of-00001.parquet")
    return tmp_path


@pytest.mark.system
def test_rows_keep_problem_picture_and_answer_and_the_recipe_trains_on_them(folder, train):
    geometry_rows.main(str(folder / "set"), folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == [str(sides[2]) for sides in TRIANGLES]
    for row, sides in zip(rows, TRIANGLES, strict=True):
        assert row["problem"] == f"<image>Find the longest side.\n{geometry_rows.INSTRUCTION}"
        (reference,) = row["images"]
        picture = Image.open(io.BytesIO(base64.b64decode(reference.removeprefix("data:image/png;base64,"))))
        assert np.array_equal(np.asarray(picture), np.asarray(triangle(sides)))
    model = tiny_vision_model(folder / "model")
    run = train(HERE / "recipe.toml", "--hf-checkpoint", model, "--prompt-data", folder / "train.jsonl", *SMALL)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [row["metrics"] for row in steps if row["kind"] == "step"]
    assert len(metrics) == 2
    assert all(step["train_rollout_logprob_abs_diff"] < 1e-5 for step in metrics)
    assert (run / "final" / "preprocessor_config.json").is_file(), "the model is complete with its image processor"
