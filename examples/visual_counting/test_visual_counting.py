"""The shipped files are the generator's, and a model made from a seed learns to count what it sees."""

import base64
import hashlib
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # as a run does for a function's file

import make_pictures  # noqa: E402

EARLY = (
    *("stage.warmup.num_rollout=2", "stage.warmup.rollout_batch_size=8", "stage.grpo.num_rollout=4"),
    *("stage.grpo.rollout_batch_size=3", "stage.grpo.n_samples_per_prompt=4", "eval.eval_tasks=[]"),
    *("--save-interval", 2),
)
SHORTER = ("stage.warmup.num_rollout=60", "stage.grpo.num_rollout=18")


def pictures(file):
    """Rows without their pictures, and the pixels of these."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    files = [base64.b64decode(row.pop("images")[0].partition(",")[2]) for row in rows]
    return rows, [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in files]


def weights(run):
    return hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def test_the_shipped_files_are_those_that_the_generator_writes(tmp_path):
    make_pictures.main(tmp_path)
    name = "model/tokenizer.json"
    assert (tmp_path / name).read_text() == (HERE / name).read_text(), "run make_pictures.py"
    for name in ("train", "heldout"):
        (rows, seen), (shipped, pixels) = (pictures(at / "data" / f"{name}.jsonl") for at in (tmp_path, HERE))
        assert rows == shipped
        assert all(np.array_equal(one, other) for one, other in zip(seen, pixels, strict=True))


def test_a_label_is_the_number_of_red_squares():
    rows, pixels = pictures(HERE / "data" / "heldout.jsonl")
    red = [int((one == (220, 40, 40)).all(-1).sum()) // 36 for one in pixels]
    assert [row["label"] for row in rows] == [str(count) for count in red]
    assert set(red) == set(range(5))


@pytest.mark.system
def test_the_recipe_learns_to_count(train, scores):
    run = train(HERE / "recipe.toml", *SHORTER)
    before, after = scores(run, "heldout")
    assert before < 0.6, "the warm-up imitates one who errs"
    assert after > 0.7
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row["kind"] == "step" and row["stage"] == "grpo"]
    assert max(step["train_rollout_logprob_abs_diff"] for step in steps) < 1e-5
    assert all(step["ledger/dropped"] == 0 for step in steps)


@pytest.mark.system
def test_a_run_that_is_killed_goes_on_to_the_same_weights(train, zygote, tmp_path):
    """After the third step of GRPO, which no checkpoint has: its groups are in the ledger, with pictures."""
    undisturbed = train(HERE / "recipe.toml", *EARLY)
    words = ("run", HERE / "recipe.toml", "--run-dir", tmp_path / "run", *EARLY)
    killed = zygote.slime(tmp_path, *words, cwd=tmp_path, SLIME_FAILPOINT="loop.stepped:5=kill")
    assert killed.returncode == -9, killed.stderr
    resumed = zygote.slime(tmp_path, *words, "--resume", "auto", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"64 issued = 64 trained \+ 0 dropped \+ 0 pending", resumed.stderr + resumed.stdout)
    assert weights(tmp_path / "run") == weights(undisturbed)
