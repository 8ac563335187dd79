"""Ranks that share sequences, matrix products or copies of the weights compute what one rank does, for any algorithm."""

import json
import sys
from functools import partial
from pathlib import Path

import pictures
import pytest
import splits
import torch
import torch.distributed.checkpoint as dcp
import trainer_bench as made
from safetensors.torch import load_file, save_file
from torch.distributed.tensor.debug import CommDebugMode

from slime_core.algorithms import OFFLINE, algorithms
from slime_core.algorithms.shared.terms import role_columns
from slime_core.errors import ConfigError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model, tiny_vision_model
from slime_core.testing.families import family_model
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.attention import PackSegments, attend
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

LAYOUTS = {
    1: {"one": {}},
    2: {"context": {"context_parallel_size": 2}, "tensor": {"tensor_parallel_size": 2}},
    4: {
        "context_of_4": {"context_parallel_size": 4},
        "context_and_copies": {"context_parallel_size": 2, "fsdp_shard_size": 2},
        "copies": {"fsdp_shard_size": 2},
        "tensor_and_context": {"tensor_parallel_size": 2, "context_parallel_size": 2, "gradient_checkpointing": True},
        "tensor_and_copies": {"tensor_parallel_size": 2, "fsdp_shard_size": 2},
    },
}
BY_DAY = {  # what a layout trains by; at night by every algorithm
    "context": ("clip", "gspo", "ppo", "tis", "dpo_loss", "on_policy_distillation"),
    "tensor": ("gspo", "ppo"),
    "context_of_4": ("gspo",),
    "context_and_copies": ("ppo",),
    "tensor_and_context": ("ppo",),
    "tensor_and_copies": (),
    "copies": (),
}
TERMS = {"kl_loss_coef": 0.05, "entropy_coef": 0.01, "max_tokens_per_gpu": 30, "num_steps_per_rollout": 2}
CASES = {
    **{name: {"advantage_estimator": name} for name in algorithms() if name not in OFFLINE.values()},
    **{loss: {"loss_type": loss} for loss in OFFLINE},
    **{case: train for case, train in splits.SETTINGS.items() if "lora_rank" not in train},
}
HEADS = ((4, 2), (9, 3), (3, 1), (2, 2))
SHARED = [0, 3, 7, 9, 14], [-1, 0, 0, -1]  # bounds of a pack's segments, and the segment that each continues


def cases_of(layout, nightly):
    """Names of what a layout trains by."""
    return CASES if nightly else BY_DAY[layout]


def layouts_of(world, nightly):
    """The layouts of ``world`` ranks that train, and by what."""
    return {name: cases for name in LAYOUTS[world] if (cases := cases_of(name, nightly))}


def rank_layouts(folder, teacher, out, layouts, rank, world):
    """Write what each layout computes by each algorithm, ``LAYOUT-CASE.safetensors``, and what it saves."""
    thread = TorchThread(1)
    for layout, cases in layouts.items():
        sizes = LAYOUTS[world][layout]
        train = {**TERMS, **sizes, "lr": 0.0, "critic_lr": 0.0, "teacher_load": str(teacher)}
        config = made.config_of(folder, **train)
        trainer = FsdpTrainer(
            config, load_plugins(config), ModelFolder.open(folder), thread=thread, rank=rank, world=world,
            rendezvous=Path(out) / "meet" if world > 1 else None,
        )  # fmt: skip
        worker = trainer._worker
        thread.call(check_exchange, worker)
        for case in cases:
            stage = made.config_of(folder, **{**train, **CASES[case]})
            rows = thread.call(numbers_of, worker, stage)
            if rank == 0:
                save_file(rows, str(Path(out) / f"{layout}-{case}.safetensors"))
        if not (out / f"{layout}-fingerprint").exists():
            thread.call(save_and_resume, worker, made.config_of(folder, **TERMS, **sizes), Path(out), layout)
    thread.close()


FAMILY_LAYOUTS = {
    "gpt-oss": {"context_parallel_size": 2},  # sinks, windows, experts
    "deepseek-v2": {"context_parallel_size": 2},  # keys wider than values
    "gemma3": {"tensor_parallel_size": 2},
}
REFUSED = {
    "qwen3-next": ({"context_parallel_size": 2}, "computes each sequence on one rank"),
    "qwen3-moe": ({"tensor_parallel_size": 2}, "its plan has moe_tp_experts, packed_colwise"),
    "gpt2": ({"tensor_parallel_size": 2}, "no plan"),
    **{family: ({"tensor_parallel_size": 2}, "it sees pictures") for family in pictures.FAMILIES},
}


def verify_families(folders, out, rank, world):
    """Families against the slow way, compiled; a mixture's routers repeat what they chose; others are refused."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    thread = TorchThread(1)

    def begin(family, **train):
        config = made.config_of(folders / family, max_tokens_per_gpu=40, compile="on", **train)
        trainer = FsdpTrainer(
            config, load_plugins(config), ModelFolder.open(folders / family), thread=thread, rank=rank, world=world,
            rendezvous=Path(out) / "meet",
        )  # fmt: skip
        thread.call(trainer._worker.begin, config)
        return trainer._worker

    for family, sizes in FAMILY_LAYOUTS.items():
        worker = begin(family, **sizes)
        report = thread.call(worker.verify, splits.with_roles(made.batch_of(groups=2, rollouts=3)))
        assert max(report["gradient_error"], report["loss_error"]) < 1e-5, (family, report)
        assert all(one.works for one in worker.policy._compiled.values())
    worker = begin("qwen3-moe", routing_replay="policy", context_parallel_size=2)
    batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
    batch.columns |= role_columns(thread.call(worker.score, batch, frozenset({"policy"})))
    metrics = thread.call(worker.step, batch)
    (Path(out) / f"experts-{rank}.json").write_text(json.dumps(metrics))
    for family, (sizes, reason) in REFUSED.items():
        with pytest.raises(ConfigError, match=f"CFG04.*{reason}"):
            begin(family, **sizes)
    thread.close()


def numbers_of(worker, stage):
    """Columns of every role, and of two optimizer steps that change nothing their metrics; gradients of the first."""
    worker.begin(stage)
    batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
    roles = {"policy", *worker.plugins.needs(worker.train)} & {"policy", "reference", "teacher", "values"}
    scored = role_columns(worker.score(batch, frozenset(roles)))
    rows = {f"score.{name}": torch.from_numpy(values.copy()) for name, values in scored.items()}
    batch.columns["values"] = batch.columns["rollout_log_probs"]
    batch.columns["returns"] = batch.columns["rollout_log_probs"] * 0.5
    totals, grads = splits.step_of(worker, batch)
    metrics = {f"total.{name}": value for name, value in totals.items()}
    metrics |= {f"metric.{name}": value for name, value in worker.step(batch).items()}
    return rows | grads | {name: torch.tensor(value).double() for name, value in metrics.items()}


def save_and_resume(worker, stage, out, layout):
    """Train from what one rank saved, save, and go on once more from there: the same bits."""
    batch = splits.with_roles(made.batch_of(groups=2, rollouts=3))
    worker.begin(stage)
    if layout != "one":
        worker.restore(out / "one-saved")
    worker.step(batch)
    with CommDebugMode() as talk:
        worker.save(out / f"{layout}-saved")
    assert talk.get_total_counts() == 0  # no rank sees what another one has
    worker.staging.wait()
    worker.barrier()
    saved = worker.fingerprint()
    worker.step(batch)
    after = worker.fingerprint()
    worker.restore(out / f"{layout}-saved")
    assert worker.fingerprint() == saved
    worker.step(batch)
    assert worker.fingerprint() == after
    for file in sorted(out.glob("*-fingerprint")):  # of other layouts
        worker.restore(out / file.name.replace("fingerprint", "saved"))
        assert worker.fingerprint() == file.read_text(), file.name
    worker.barrier()
    if worker.rank == 0:
        (out / f"{layout}-fingerprint").write_text(saved)
    worker.barrier()


def check_exchange(worker):
    """Attention of rows that ranks share, and its gradients, are those of all rows, whatever heads there are."""
    ranks, count = worker.ranks.as_context(), SHARED[0][-1]
    if ranks.size == 1:
        return
    rows = torch.from_numpy(ranks.places(count)).clamp(max=count - 1)
    real = torch.from_numpy(ranks.places(count) < count)
    for heads, kv_heads in HEADS:
        torch.manual_seed(heads)
        inputs = [torch.randn(count, n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
        slope = torch.randn(count, heads, 8, dtype=torch.float64)
        results = []
        for exchange in (None, ranks.exchange(count)):
            segments = PackSegments.of(*SHARED, "cpu", exchange)
            q, k, v = ((x if exchange is None else x[rows]).clone().requires_grad_() for x in inputs)
            if exchange is None:
                result = attend(q, k, v, segments, 0.3, 3)
                grads = torch.autograd.grad((result * slope).sum(), (q, k, v))
                results.append([x[rows][real] for x in (result, *grads)])
            else:
                result = exchange.rows_of_all_heads(
                    attend(*exchange.heads_of_all_rows(q, k, v), segments, 0.3, 3), heads
                )
                grads = torch.autograd.grad((result * slope[rows])[real].sum(), (q, k, v))
                results.append([x[real] for x in (result, *grads)])
        torch.testing.assert_close(*results)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return tiny_model(place / "policy", tied=True), tiny_model(place / "teacher", seed=4, layers=1)


@pytest.fixture(scope="module")
def out(models, tmp_path_factory):
    return tmp_path_factory.mktemp("out")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), marks=pytest.mark.nightly),
        (4, False),
        pytest.param((2, True), marks=pytest.mark.nightly),
        pytest.param((4, True), marks=pytest.mark.nightly),
    ],
    ids=["2_ranks", "4_ranks", "2_ranks_every_algorithm", "4_ranks_every_algorithm"],
)
def together(request, models, out, zygote, tmp_path_factory):
    world, nightly = request.param
    cases = {case for cases in layouts_of(world, nightly).values() for case in cases}
    rank_layouts(*models, out, {"one": [c for c in cases if not (out / f"one-{c}.safetensors").exists()]}, 0, 1)
    ranks = [[__file__, *models, out, int(nightly), rank, world] for rank in range(world)]
    (out / "meet").unlink(missing_ok=True)
    zygote.together(tmp_path_factory.mktemp("said"), ranks)
    return request.param


def test_layouts_score_and_train_as_one_rank_by_every_algorithm(out, together):
    world, nightly = together
    for layout, cases in layouts_of(world, nightly).items():
        for case in cases:
            one, many = (load_file(str(out / f"{name}-{case}.safetensors")) for name in ("one", layout))
            assert one.keys() == many.keys(), case
            for name, want in one.items():
                atol = max(1e-6, 3e-5 * float(want.abs().max()))
                where = f"{layout} {case} {name}"
                torch.testing.assert_close(
                    many[name], want, rtol=2e-4, atol=atol, msg=lambda t, where=where: f"{where}: {t}"
                )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_one_rank_and_torch_have_the_bits_that_a_layout_saved_in_even_shares(out, together, bench, models):
    world = together[0]
    for layout in layouts_of(*together):
        one, saved = bench(folder=models[0], **TERMS), out / f"{layout}-saved"
        one.call("restore", saved)
        assert one.call("fingerprint") == (out / f"{layout}-fingerprint").read_text()
        read = {name: torch.empty_like(tensor) for name, tensor in one.parameters().items()}
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(saved)), no_dist=True)
        assert all(torch.equal(read[name], tensor) for name, tensor in one.parameters().items()), layout
        sizes = [sum(file.stat().st_size for file in saved.glob(f"*-{n + 1}-of-{world}.*")) for n in range(world)]
        assert max(sizes) < 1.3 * min(sizes), (layout, sizes)


def test_families_share_sequences_and_products_compiled_or_are_refused_by_name(bench, zygote, tmp_path):
    for family in {*FAMILY_LAYOUTS, *REFUSED}:
        (tiny_vision_model if family in pictures.FAMILIES else family_model)(tmp_path / family, family)
    ranks = [[__file__, tmp_path, tmp_path, rank, 2] for rank in range(2)]
    zygote.together(tmp_path, ranks)
    one, batch = (
        bench(folder=tmp_path / "qwen3-moe", routing_replay="policy"),
        splits.with_roles(made.batch_of(groups=2, rollouts=3)),
    )
    batch.columns |= role_columns(one.call("score", batch, frozenset({"policy"})))
    want = one.call("step", batch)
    for rank in range(2):
        assert json.loads((tmp_path / f"experts-{rank}.json").read_text()) == pytest.approx(want, rel=1e-4, abs=1e-6)


if __name__ == "__main__":
    *places, rank_, world_ = sys.argv[1:]
    if len(places) == 2:
        verify_families(*map(Path, places), int(rank_), int(world_))
    else:
        rank_layouts(*map(Path, places[:3]), layouts_of(int(world_), places[3] == "1"), int(rank_), int(world_))
