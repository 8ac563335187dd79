"""The benchmarks of SGLang: the same load on both sides, ratios of pairs, stages that add up, and every wait bounded."""

import asyncio
import json
from argparse import Namespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.unit


def test_the_loop_keeps_so_many_in_flight_and_asks_each_once(tool):
    bench, running, most, asked = tool("bench_rollout"), 0, 0, []

    async def ask(index):
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(index)
        await asyncio.sleep(0)
        running -= 1

    seconds = asyncio.run(bench.closed_loop(50, 8, ask))
    assert seconds > 0
    assert most == 8
    assert sorted(asked) == list(range(50))


def test_both_sides_send_the_same_prompts_and_ask_for_the_same_tokens(tool):
    bench = tool("bench_rollout")
    args = Namespace(prompt=5, response=7)
    once, again = (bench.make_requests(args, "r8-0", 4, 100) for _ in range(2))
    assert [r.tokens for r in once] == [r.tokens for r in again]
    assert {len(r.tokens) for r in once} == {5}
    body = bench.raw_body(once[2], seeds=True)
    assert body["input_ids"] == once[2].tokens
    assert body["return_logprob"] is True
    assert body["sampling_params"] == {"max_new_tokens": 7, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 2}
    assert "sampling_seed" not in bench.raw_body(once[2], seeds=False)["sampling_params"]
    other = bench.make_requests(args, "r8-1", 4, 100)
    assert not {tuple(r.tokens) for r in once} & {tuple(r.tokens) for r in other}


def test_a_ratio_is_of_two_rounds_beside_each_other(tool, capsys):
    bench = tool("bench_rollout")
    pairs = bench.Pairs(256, 512, raw=[100.0, 200.0, 400.0], slime=[90.0, 200.0, 380.0])
    assert pairs.ratios() == [0.9, 1.0, 0.95]
    args = Namespace(shape="4B", deterministic=False, router="builtin", prompt=128, response=512)
    bench.show(args, Namespace(device="cpu"), [pairs])
    *_, table, row = capsys.readouterr().out.splitlines()
    assert table.split() == ["256", "512", "200", "200", "0.950", "0.900", "to", "1.000", "over", "3", "pairs"]
    what = "rollout through slime over raw, 4B, 256 in flight"
    assert row == f"| {what} | at least 0.95 | 0.950 (0.900 to 1.000); 200 of 200 tokens/s |"


def test_a_row_of_an_update_tells_its_median_and_its_parts(tool, capsys):
    bench = tool("bench_weight_sync")
    found = bench.Rounds(
        "tensor", target="0.05 s", total=[0.08, 0.07, 0.09], publish=[0.02] * 3, load=[0.02] * 3, canary=[0.1] * 3
    )
    found.later, found.stages, found.bound, found.what = [0.03] * 3, {"first token": [0.04] * 3}, 0.004, "one copy"
    bench.show(found, 8 * 10**9)
    *_, stages, row = capsys.readouterr().out.splitlines()
    assert "next token 0.0300" in stages
    assert "| 0.05 s | 0.0800 s (0.0700 to 0.0900; publish 0.0200, load 0.0200, first token 0.0400)" in row


@pytest.mark.parametrize(("shape", "count"), [("tiny", 24), ("tiny-moe", 45)])
def test_checksums_alone_are_of_every_tensor_of_a_shape(tool, capsys, shape, count):
    tool("bench_weight_sync").sums(shape, "cpu", 2, 1)
    (row,) = capsys.readouterr().out.splitlines()
    assert row.startswith(f"| checksums of 0.00 GB, {shape}, {count} tensors, as 2 ranks hold them | 0.5 s | ")


def test_a_model_that_is_kept_is_made_once_and_linked(tool, tmp_path, monkeypatch):
    place = tool("sglang_place")
    monkeypatch.setenv("SLIME_BENCH_MODELS", str(tmp_path / "kept"))
    first = place.make_folder(tmp_path / "one" / "model", "tiny")
    made = (first / "model.safetensors").stat()
    second = place.make_folder(tmp_path / "two" / "model", "tiny")
    assert (second / "model.safetensors").stat().st_ino == made.st_ino
    assert (second / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    other = place.make_folder(tmp_path / "three" / "model", "tiny", seed=1)
    assert (other / "model.safetensors").stat().st_ino != made.st_ino
    assert [path.name for path in (tmp_path / "kept").rglob("*.tmp")] == []


def test_stages_are_counted_and_functions_put_back(tool):
    bench = tool("bench_weight_sync")
    before = bench.buckets.Staging.fill, bench.Client.post

    watch = bench.Watch()
    with watch.on():
        assert bench.buckets.Staging.fill is not before[0]
        bench.buckets.Staging([], len).fill(iter(()))
    assert watch.seconds.keys() == {"cast"}
    assert (bench.buckets.Staging.fill, bench.Client.post) == before


def test_the_bound_of_a_disk_is_a_plain_file_that_is_gone_afterwards(tool, tmp_path):
    bench = tool("bench_weight_sync")
    write, read = bench.disk_bound(40 << 20, tmp_path)
    assert write > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_seed_is_the_same_twice_and_another_for_another_seed(tool, tmp_path):
    place = tool("sglang_place")
    made = [place.make_folder(tmp_path / name, "tiny", seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in made)
    assert first == again != other


def test_experts_lie_in_the_folder_as_in_released_ones(tool, tmp_path, monkeypatch):
    """One matrix an expert, in files with an index; transformers finds every tensor."""
    place = tool("sglang_place")
    monkeypatch.setattr(place, "SHARD", 200_000)

    folder = place.make_folder(tmp_path / "model", "tiny-moe")

    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {name: list(found) for name, found in told.items() if found} == {}
    names = json.loads((folder / place.INDEX).read_text())["weight_map"]
    assert len(set(names.values())) > 1
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    with safe_open(folder / names["model.layers.1.mlp.experts.3.up_proj.weight"], "pt") as file:
        up = file.get_tensor("model.layers.1.mlp.experts.3.up_proj.weight")
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj[3, 32:], up)
