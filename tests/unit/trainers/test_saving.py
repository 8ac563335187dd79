"""A trainer's state: copied while training waits, written behind; cut by owners, read by rows; refused where it differs."""

import asyncio
import errno
import json
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import trainer_bench as made
from forked_channel import start_forked
from safetensors.torch import load_file, save_file

from slime_core import durable
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.sections.cluster import ClusterSection
from slime_core.durable import Disk
from slime_core.errors import StorageError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.testing import tiny_model
from slime_core.trainers.fsdp import state_files as files
from slime_core.trainers.fsdp.checkpoint import StatePart, writers
from slime_core.trainers.fsdp.slices import KEY, slices_metadata
from slime_core.trainers.offload import BLOCK, FileLayout, HostStaging

pytestmark = pytest.mark.unit


class Held(Disk):
    """Files are not begun before ``let`` is set."""

    def __init__(self):
        self.let = threading.Event()

    def create(self, path):
        assert self.let.wait(60)
        return super().create(path)


@pytest.fixture
def held(monkeypatch):
    disk = Held()
    monkeypatch.setattr(durable, "disk", disk)
    yield disk
    disk.let.set()


def save(one, path):
    """Only the part that training waits for."""
    one.thread.call(one.worker.save, path)


def test_steps_go_on_while_files_are_written_and_are_not_in_them(bench, tmp_path, held):
    one = bench(advantage_estimator="ppo", critic_lr=1e-3)
    batch = made.batch_of()
    batch.columns |= {"values": np.zeros(len(batch.loss_mask), np.float32)}
    batch.columns["returns"] = batch.columns["values"] + 1
    one.call("step", batch)
    before = one.call("fingerprint")
    save(one, tmp_path / "saved")
    for _ in range(2):
        one.call("step", batch)
    assert one.trainer.written() is None
    assert list((tmp_path / "saved").iterdir()) == []
    assert one.call("fingerprint") != before
    held.let.set()
    assert set(one.saved()) == {path.name for path in (tmp_path / "saved").iterdir()}
    one.call("restore", tmp_path / "saved")
    assert one.call("fingerprint") == before
    assert one.worker.actor.optimizer.steps == 1


def test_a_second_save_waits_for_the_first(bench, tmp_path, held):
    one = bench()
    save(one, tmp_path / "first")
    second = threading.Thread(target=save, args=(one, tmp_path / "second"))
    second.start()
    assert not (tmp_path / "second").exists()
    held.let.set()
    second.join(60)
    one.saved()
    assert (tmp_path / "first" / "parameters.safetensors").exists()
    assert (tmp_path / "second" / "parameters.safetensors").exists()


def test_offloaded_state_is_saved_from_the_host(bench, tmp_path):
    one = bench()
    one.call("step", made.batch_of())
    one.call("save", tmp_path / "here")
    offload, tensor = one.worker.offload, next(iter(one.worker.actor.locals().values()))
    one.thread.call(offload.to_host, {"parameters", "optimizer", "gradients"})
    one.call("save", tmp_path / "away")
    assert tensor.untyped_storage().nbytes() == 0
    for name in ("parameters.safetensors", "moments.safetensors", "trainer.json", "generators.json"):
        assert (tmp_path / "away" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name
    one.thread.call(offload.to_device, offload.on_host)
    assert torch.equal(offload.readable(tensor), tensor)
    one.call("step", made.batch_of())


def test_files_are_read_by_the_safetensors_library(bench, tmp_path):
    one = bench()
    one.call("step", made.batch_of())
    marks = one.call("save", tmp_path / "saved")
    stored = load_file(str(tmp_path / "saved" / "parameters.safetensors"))
    assert all(torch.equal(stored[name], tensor) for name, tensor in one.parameters().items())
    moments = load_file(str(tmp_path / "saved" / "moments.safetensors"))
    for name in stored:
        assert torch.equal(moments[f"moment1.{name}"], one.worker.actor.optimizer.moment1[name])
        assert torch.equal(moments[f"moment2.{name}"], one.worker.actor.optimizer.moment2[name])
    assert all(durable.sha256_of(tmp_path / "saved" / name) == mark for name, mark in marks.items())


def test_before_the_first_step_there_are_no_moments(bench, tmp_path):
    one = bench()
    assert set(one.call("save", tmp_path / "saved")) == {"generators.json", "parameters.safetensors", "trainer.json"}
    one.call("step", made.batch_of())
    one.call("restore", tmp_path / "saved")
    assert one.worker.actor.optimizer.steps == 0
    assert one.worker.actor.optimizer.moment1 == {}


@pytest.mark.parametrize("method", ["create", "write", "sync", "make_folder"])
def test_a_full_disk_is_the_writers_error_and_the_next_save_works(bench, tmp_path, monkeypatch, method):
    one = bench()

    class Full(Disk):
        pass

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    setattr(Full, method, fail)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "disk", Full())
        with pytest.raises(StorageError, match="STO109"):
            one.call("save", tmp_path / "first")
    one.call("save", tmp_path / "second")
    one.call("restore", tmp_path / "second")


def test_all_differences_are_listed_in_one_message(bench, tmp_path):
    """A checkpoint of another model."""
    one = bench()
    one.call("save", tmp_path / "saved")
    other = bench(folder=tiny_model(tmp_path / "other", hidden=32, layers=1))
    before = other.call("fingerprint")
    with pytest.raises(TrainerError, match="TRN108") as caught:
        other.call("restore", tmp_path / "saved")
    assert "is not in the model" in caught.value.why
    assert " in the checkpoint and " in caught.value.why
    assert caught.value.why.count(" in the checkpoint and ") == files.SHOWN
    assert "differ in 25 places" in caught.value.what
    assert other.call("fingerprint") == before


@pytest.mark.parametrize("kind", ["parameters", "moments"])
def test_a_stored_dtype_that_drifted_is_refused(bench, tmp_path, kind):
    """Float32 was saved, the file holds bfloat16."""
    one = bench()
    one.call("step", made.batch_of())
    one.call("save", tmp_path / "saved")
    file = tmp_path / "saved" / f"{kind}.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(str(file)).items()}, str(file))
    before = one.call("fingerprint")
    with pytest.raises(TrainerError, match="TRN108") as caught:
        one.call("restore", tmp_path / "saved")
    assert "is BF16 in the checkpoint and F32 in the model" in caught.value.why
    assert one.call("fingerprint") == before


def test_a_checkpoint_without_a_critic_does_not_fit_a_stage_that_has_one(bench, tmp_path):
    bench().call("save", tmp_path / "saved")
    with pytest.raises(TrainerError, match=r"TRN108.*no critic"):
        bench(advantage_estimator="ppo", critic_lr=1e-3).call("restore", tmp_path / "saved")


def test_the_generators_of_the_process_go_on_where_they_were(bench, tmp_path):
    one = bench()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    one.call("save", tmp_path / "saved")
    want = random.random(), np.random.random(), torch.rand(1).item()
    one.call("restore", tmp_path / "saved")
    assert (random.random(), np.random.random(), torch.rand(1).item()) == want


def test_the_generators_of_another_number_of_ranks_are_left_alone(bench, tmp_path):
    one = bench()
    one.call("save", tmp_path / "saved")
    (tmp_path / "saved" / "generators.json").rename(tmp_path / "saved" / "generators-1-of-2.json")
    torch.manual_seed(3)
    want = torch.rand(1).item()
    torch.manual_seed(3)
    one.call("restore", tmp_path / "saved")
    assert torch.rand(1).item() == want


def test_ranks_with_copies_write_about_the_same():
    sizes = {"embed": 900, "a": 300, "b": 300, "c": 300, "norm": 4}
    parts = [
        StatePart(kind, name, name, torch.empty(0), torch.empty(size))
        for name, size in sizes.items()
        for kind in ("parameters", "moments", "moments")
    ]
    for copies in (1, 2, 3):
        parts = [replace(part, copy=(0, copies)) for part in parts]
        writer = writers(parts)
        loads = [sum(size for name, size in sizes.items() if writer[name] == copy) for copy in range(copies)]
        assert max(loads) <= max(900, 1804 / copies + 4)
        assert writer == writers(list(reversed(parts)))


def test_tensors_cross_the_borders_of_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_core.trainers.offload.BLOCK", 24)
    monkeypatch.setattr("slime_core.trainers.offload.PIECE", 10)
    tensors = {"a": torch.arange(5.0), "none": torch.zeros(0, 3), "b": torch.arange(33, dtype=torch.int8)}
    tensors |= {"half": torch.randn(3, 3).bfloat16(), "turned": torch.randn(4, 5).t()}
    staging = HostStaging(torch.device("cpu"))
    layouts = [FileLayout("x", {n: (t.shape, t.dtype) for n, t in tensors.items()})]
    layouts.append(FileLayout("y", {"again": (torch.Size([5]), torch.float32)}))
    for _ in range(2):
        staging.wait()
        staging.plan(layouts)
        for name, tensor in tensors.items():
            staging.copy(layouts[0].starts()[name], tensor)
        staging.copy(layouts[1].starts()["again"], tensors["a"])
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        staging.write(folder, {"text": b"{}"})
        marks = staging.writing.result()
        assert {name: durable.sha256_of(folder / name) for name in ("x", "y", "text")} == marks
        found = load_file(str(folder / "x"))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert torch.equal(load_file(str(folder / "y"))["again"], tensors["a"])
    assert BLOCK == 64 << 20


def test_only_tensors_that_change_during_the_write_are_copied_first(tmp_path, held):
    """On a CPU: the last save of a run needs no memory beside the state's own."""
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3.0)}
    layout = FileLayout("x", {n: (t.shape, t.dtype) for n, t in tensors.items()})
    staging = HostStaging(torch.device("cpu"))
    for name, change in (("still", False), ("changing", True)):
        staging.plan([layout])
        for key, tensor in tensors.items():
            staging.copy(layout.starts()[key], tensor)
        (tmp_path / name).mkdir()
        staging.write(tmp_path / name, {})
        places = [source.data_ptr() for _, source in staging._sources]
        assert places == [tensor.data_ptr() for tensor in tensors.values()]
        if change:
            staging.before_change()
            tensors["b"] += 1
        held.let.set()
        staging.writing.result()
        found = load_file(str(tmp_path / name / "x"))
        assert found["b"].tolist() == [0, 1, 2]
        held.let.clear()


SETTINGS = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "kl_loss_coef": 0.05}


@pytest.mark.integration
def test_the_number_of_ranks_may_change_and_change_back(bench, tmp_path):
    """1 -> 2 -> 1: parameters, moments, reference and critic to the last bit."""
    folder = tiny_model(tmp_path / "model", tied=True)
    one = bench(folder=folder, **SETTINGS)
    batch = made.batch_of()
    batch.columns |= {"values": np.zeros(len(batch.loss_mask), np.float32)}
    batch.columns["returns"] = batch.columns["values"] + 1
    batch.columns["reference"] = one.call("score", batch, frozenset({"reference"}))["reference"]["log_probs"]
    one.call("step", batch)
    one.call("save", tmp_path / "one")
    want = one.call("fingerprint")

    async def two():
        cluster = {"device": "cpu", "cpu_threads": 1}
        config = made.config_of(folder, **SETTINGS).model_copy(update={"cluster": ClusterSection(**cluster)})
        ranks = RankTrainer(config, load_plugins(config), world=2, run_dir=tmp_path / "run", start=start_forked)
        async with ranks as trainer:
            await trainer.begin(config)
            await trainer.restore(tmp_path / "one")
            assert await trainer.fingerprint() == want
            await trainer.save(tmp_path / "two")
            marks = await trainer.saved()
            await trainer.step(batch)
            assert await trainer.fingerprint() != want
            return marks

    marks = asyncio.run(two())
    assert set(marks) == {path.name for path in (tmp_path / "two").iterdir()}
    assert all(durable.sha256_of(tmp_path / "two" / name) == mark for name, mark in marks.items())
    sizes = [sum(mark.size for name, mark in marks.items() if f"-{rank}-of-2" in name) for rank in (1, 2)]
    assert max(sizes) < 1.2 * min(sizes)
    for kind in (files.PARAMETERS, files.MOMENTS, files.REFERENCE, files.CRITIC, files.CRITIC_MOMENTS):
        saved = load_file(str(tmp_path / "one" / f"{kind}.safetensors"))
        both = {files.PREFIXES.get(kind, "") + name: t for name, t in files.tensors_of(tmp_path / "two", kind).items()}
        assert both.keys() == saved.keys()
        assert all(torch.equal(t.read([0] * len(t.shape), t.shape), saved[name]) for name, t in both.items()), kind
    again = bench(folder=folder, **SETTINGS)
    again.call("restore", tmp_path / "two")
    assert again.call("fingerprint") == want
    assert again.call("step", batch) == one.call("step", batch)
    assert again.call("fingerprint") == one.call("fingerprint")


def test_a_saver_of_its_own_thread_does_not_wait_for_torch(bench, tmp_path, held):
    """`saved` is answered while the torch thread computes."""
    one = bench()
    save(one, tmp_path / "saved")
    busy, go = threading.Event(), threading.Event()

    def compute():
        busy.set()
        assert go.wait(30)

    held.let.set()
    computing = one.thread._pool.submit(compute)
    assert busy.wait(60)
    assert "parameters.safetensors" in one.saved()
    assert not computing.done()
    go.set()
    computing.result()


def test_checkpoints_of_format_2_hold_whole_tensors_by_ranks(bench, tmp_path):
    one = bench()
    one.call("save", tmp_path)
    tensors = list(load_file(str(tmp_path / "parameters.safetensors")).items())
    (tmp_path / "parameters.safetensors").unlink()
    for rank in range(2):
        save_file(dict(tensors[rank::2]), str(tmp_path / f"parameters-{rank + 1}-of-2.safetensors"))
    state = json.loads((tmp_path / files.STATE).read_text())
    want = one.call("fingerprint")
    one.call("step", made.batch_of())
    for form in (4, 2):
        (tmp_path / files.STATE).write_text(json.dumps({**state, "format": form}))
        if form == 4:
            with pytest.raises(StorageError, match=r"STO113.*format 4, not 2 or 3"):
                one.call("restore", tmp_path)
    one.call("restore", tmp_path)
    assert one.call("fingerprint") == want


def test_names_of_a_critic_have_no_prefix_for_readers_as_in_older_checkpoints(tmp_path):
    for folder, name in (("older", "score.weight"), ("newer", "critic.score.weight")):
        (tmp_path / folder).mkdir()
        save_file({name: torch.ones(1, 4)}, str(tmp_path / folder / "critic.safetensors"))
        assert list(files.tensors_of(tmp_path / folder, files.CRITIC)) == ["score.weight"]


def test_slices_are_read_in_boxes_of_any_cut_and_missed_where_a_file_is_gone(tmp_path):
    whole = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    boxes = [((0, 0, 0), (3, 6, 2)), ((3, 0, 0), (1, 6, 2)), ((0, 0, 2), (4, 5, 3)), ((0, 5, 2), (4, 1, 3))]

    def part(starts, shape):
        return whole[tuple(slice(start, start + size) for start, size in zip(starts, shape))]

    for number, (starts, shape) in enumerate(boxes):
        metadata = slices_metadata({"a": (starts, whole.shape)})
        save_file(
            {"a": part(starts, shape).contiguous()},
            str(tmp_path / f"parameters-{number + 1}-of-4.safetensors"),
            metadata,
        )
    saved = files.tensors_of(tmp_path, files.PARAMETERS)["a"]
    for starts, shape in (
        *boxes,
        ((0, 0, 0), whole.shape),
        ((1, 2, 1), (3, 4, 3)),
        ((2, 5, 4), (1, 1, 1)),
        ((4, 0, 0), (0, 6, 5)),
    ):
        assert torch.equal(saved.read(starts, shape), part(starts, shape)), (starts, shape)
    (tmp_path / "parameters-2-of-4.safetensors").unlink()
    with pytest.raises(StorageError, match=r"STO111.*of 120 elements of a 108 are stored"):
        files.tensors_of(tmp_path, files.PARAMETERS)
    save_file({"a": whole}, str(tmp_path / "parameters-2-of-4.safetensors"), {KEY: '{"a": []}'})
    with pytest.raises(StorageError, match="STO112"):
        files.tensors_of(tmp_path, files.PARAMETERS)
