"""Requests with pictures to the real server, against transformers: the tokens that it counts, log-probs, new weights.

A picture's features are computed by the server's own tower from the PNG that slime makes of the sample's pixels.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from raw_server import Loop, start
from served_engine import load, serving
from served_recipe import enlarged_counting

from slime_core.media.processor import MediaProcessor
from slime_core.testing.vision import tiny_vision_model
from slime_core.types import GenerateRequest, Media, Sample, SamplingParams
from slime_core.weights.folder import ModelFolder
from slime_sglang.engine import SglangEngine
from slime_sglang.host import Launch
from slime_sglang.pictures import OPTIONS, UNKEPT

pytestmark = [pytest.mark.system, pytest.mark.sglang]

BAND = 1e-4  # of log-probs in float32
TENSORS = {"qwen2_5_vl": 50, "qwen3_vl": 72}
WORDS = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def pictures(folder: Path, count: int) -> list[str]:
    """Files of noise, of odd sizes."""
    draw, files = np.random.default_rng(count), []
    for number, (width, height) in enumerate(((61, 45), (30, 97), (64, 64))[:count]):
        files.append(str(folder / f"{count}-{number}.png"))
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(files[-1])
    return files


class Reference:
    """transformers' model of a folder, and requests of pictures as slime makes them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = ModelFolder.open(folder).tokenizer()
        media = MediaProcessor.of(self.tokenizer)
        assert media is not None
        self.media = media

    async def request(self, name: str, files: list[str]) -> GenerateRequest:
        """Text, and each file somewhere in it."""
        mark = self.media.marks["images"]
        short = self.tokenizer.encode("12+3=" + "".join(f" ab{mark} cd" for _ in files), add_special_tokens=False)
        inputs = {"images": files}
        sample = Sample(id=name, tokens=self.media.expand(short, inputs), multimodal_inputs=inputs if files else None)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        media = await self.media.request(sample)
        return GenerateRequest(id=name, tokens=sample.tokens, params=params, seed=5, media=media)

    @torch.no_grad()
    def log_probs(self, tokens: list[int], start: int, media: Media | None) -> list[float]:
        """Of ``tokens[start:]``."""
        ids = torch.tensor([tokens[:-1]])  # the last may be a placeholder that the model drew
        arrays = {} if media is None else {name: torch.from_numpy(one) for name, one in media.arrays.items()}
        kinds = (ids == self.model.config.image_token_id).int()
        logits = self.model(ids, mm_token_type_ids=kinds, attention_mask=torch.ones_like(ids), **arrays).logits
        scores = logits[0].log_softmax(-1)
        return [float(scores[at - 1, tokens[at]]) for at in range(start, len(tokens))]


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.nightly)])
def test_pictures_count_compute_and_change_weights_as_in_transformers(
    family: Any, loop: Loop, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    folders = [tiny_vision_model(tmp_path / f"model-{seed}", family, seed) for seed in range(2)]
    started = launch(*WORDS, model=folders[0])
    server = start(loop, replace(started, env={**started.env, **UNKEPT}), folders[0])
    try:
        loop.run(exchange(server.server, folders, tmp_path, TENSORS[family]), 200)
    finally:
        server.stop()


async def exchange(server: Any, folders: list[Path], path: Path, count: int) -> None:
    """Requests with the weights of one folder, then with those of the other."""
    async with serving(server, folders[0], path, []) as engine:
        assert "multimodal" in engine.abilities
        for version, (folder, counts) in enumerate(zip(folders, ((2, 3, 0), (2,)), strict=True), 1):
            await load(engine, folder, version, count)
            await compare(engine, Reference(folder), path, counts)


async def compare(engine: SglangEngine, reference: Reference, path: Path, counts: Sequence[int]) -> None:
    """Requests at once, with so many pictures each, whole and continued; then their scores."""
    requests = [await reference.request(f"r{n}", pictures(path, n)) for n in counts]
    answers = await asyncio.gather(*map(engine.generate, requests))
    for request, done in zip(requests, answers, strict=True):
        tokens = [*request.tokens, *done.tokens]
        begin = len(request.tokens)
        expected = reference.log_probs(tokens, begin, request.media)
        np.testing.assert_allclose(done.log_probs, expected, atol=BAND)
        at = begin + min(4, len(done.tokens) - 1)
        more = await engine.generate(replace(request, tokens=tokens[:at], kept=at - begin))
        continued = [*tokens[:at], *more.tokens]
        np.testing.assert_allclose(more.log_probs, reference.log_probs(continued, at, request.media), atol=BAND)
        scored = [*request.tokens, *(t for t in done.tokens if t not in reference.media.layout.ids)]
        scores = await engine.score(scored, begin - 3, request.media)
        np.testing.assert_allclose(scores, reference.log_probs(scored, begin - 3, request.media), atol=BAND)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_model_learns_to_count_through_sglang_with_its_tower(slime: Any, sglang_python: str, tmp_path: Path) -> None:
    """The example's recipe: its tower is trained, so the server may keep no features of a picture."""
    enlarged_counting(tmp_path)
    flags = ("--device", "cpu", "--rollout-engine", "sglang", "--sglang-python", sglang_python)
    words = ("sglang.mem_fraction_static=0.2", "sglang.max_total_tokens=20000", "sglang.env.OMP_NUM_THREADS=1")
    done = slime("run", "recipe.toml", *flags, *words, "--run-dir", "run", timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    warm, end = [line["metrics"]["reward/mean"] for line in lines if line["kind"] == "eval"]
    assert end > warm + 0.2
    steps = [line["metrics"] for line in lines if line["kind"] == "step" and line["stage"] == "grpo"]
    assert all(metrics["train_rollout_logprob_abs_diff"] < BAND for metrics in steps)
