"""Ranks over gloo: several processes do what one does, idle ranks included, and fail together."""

import json
import re
from pathlib import Path

import pytest
import rank_main
import torch
from safetensors.torch import load_file

from slime_core.testing import tiny_model
from slime_core.threads import TorchThread

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
WORLDS = [2, pytest.param(3, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    out, thread = tmp_path_factory.mktemp("one"), TorchThread(1)
    for case in rank_main.CASES:
        rank_main.run(case, folder, out, thread)
    thread.close()
    return out


@pytest.fixture(scope="module", params=WORLDS, ids="{}_ranks".format)
def together(request, folder, zygote, tmp_path_factory):
    out, world = tmp_path_factory.mktemp("many"), request.param
    ranks = [[HERE / "rank_main.py", folder, out, rank, world] for rank in range(world)]
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    return out


def saved(folder, kind):
    """All tensors of a kind, of whichever rank wrote them."""
    files = [file for file in folder.iterdir() if re.fullmatch(rf"{kind}(-\d+-of-\d+)?\.safetensors", file.name)]
    assert files
    return {name: tensor for file in files for name, tensor in load_file(str(file)).items()}


@pytest.mark.parametrize("case", ["plain", "alone", "critic", "skipping"])
def test_several_ranks_score_and_train_as_one(alone, together, case):
    one, many = (load_file(str(out / f"{case}.safetensors")) for out in (alone, together))
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}")


@pytest.mark.parametrize(
    "file",
    [
        "plain-saved/moments",
        "plain-saved/parameters",
        "plain-final/model",
        "critic-saved/critic",
        "critic-saved/critic_moments",
    ],
)
def test_several_ranks_write_the_tensors_of_one(alone, together, file):
    one, many = (saved((out / file).parent, Path(file).name) for out in (alone, together))
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in many.items()}


def test_ranks_fail_together_and_name_the_sample(together):
    errors = {file.read_text() for file in together.glob("broken-error-*")}
    assert len(errors) == 1
    (error,) = errors
    assert "TRN95" in error
    assert "main/0-0" in error


def test_ranks_train_one_critic_between_them(alone, together):
    one, many = (saved(out / "critic-saved", "critic") for out in (alone, together))
    for name, tensor in one.items():
        torch.testing.assert_close(many[name], tensor, rtol=2e-4, atol=3e-6, msg=lambda t, name=name: f"{name}: {t}")
    metrics = load_file(str(together / "critic.safetensors"))
    assert metrics["metric.1.value_loss"] > 0
    assert metrics["score.values"].abs().max() > 0


def test_ranks_skip_together_and_one_of_them_writes_the_samples(alone, together):
    for out in (alone, together):
        rows = [json.loads(line) for line in (out / "skipping-errors" / "nonfinite.jsonl").read_text().splitlines()]
        assert [row["samples"] for row in rows] == [["main/0-0"]] * 2
    metrics = load_file(str(together / "skipping.safetensors"))
    assert (metrics["metric.0.skipped_steps/nonfinite"], metrics["metric.0.optimizer_steps"]) == (1.0, 1.0)


def test_a_rank_with_another_batch_is_named_by_all(together):
    errors = [file.read_text() for file in sorted(together.glob("divergent-error-*"))]
    world = len(errors)
    assert world > 1
    for error in errors:
        assert error.startswith(f"TRN106 ranks [{world - 1}] of {world}")
