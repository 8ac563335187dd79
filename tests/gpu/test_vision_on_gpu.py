"""Steps on samples with pictures on a GPU: float32 gives transformers' log-probs, bfloat16 steps follow float32's."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from slime_core.plugins import load_plugins
from slime_core.testing import tiny_vision_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.weights.folder import ModelFolder

sys.path.append(str(Path(__file__).parents[1] / "unit" / "trainers"))

import trainer_bench as made
from pictures import FAMILIES, forward_of, picture_batch

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("SLIME_GPU_TESTS_DEVICE", "cuda")


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "learning"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_with_pictures_are_those_of_transformers_in_each_dtype(tmp_path, family, frozen):
    path = tiny_vision_model(tmp_path / "model", family)
    folder = ModelFolder.open(path)
    batch, norms, scores, threads = picture_batch(family, folder.config), {}, {}, []
    for dtype in ("float32", "bfloat16"):
        config = made.config_of(path, dtype=dtype, freeze_vision_tower=frozen, max_tokens_per_gpu=64)
        threads.append(TorchThread(1))
        call = threads[-1].call
        worker = FsdpTrainer(config, load_plugins(config), folder, thread=threads[-1], device=DEVICE)._worker
        call(worker.begin, config)
        assert worker.policy.packs
        scores[dtype] = call(worker.score, batch, frozenset({"policy"}))["policy"]["log_probs"]
        norms[dtype] = [call(worker.step, batch)["grad_norm"] for _ in range(3)]
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    for i in range(len(batch)):
        count, start = int(batch.response_lengths[i]), int(batch.response_offsets[i])
        targets = torch.from_numpy(batch.tokens[batch.offsets[i + 1] - count : batch.offsets[i + 1]].astype(np.int64))
        with torch.no_grad():
            want = forward_of(model, batch, i)[-count - 1 : -1].log_softmax(-1)[torch.arange(count), targets]
        np.testing.assert_allclose(scores["float32"][start : start + count], want, atol=2e-4)
        np.testing.assert_allclose(scores["bfloat16"][start : start + count], want, atol=0.1)
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.1)
    for thread in threads:
        thread.close()
