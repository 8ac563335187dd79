"""What leaves the trainer: buckets and their checksums, folders that appear whole, handles that another process reads."""

import errno
import json
import os
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from travelling import QK, TOP, sent, sources_of, tensors_of

from slime_core.errors import StorageError, TrainerError
from slime_core.types import Piece, RankTensor, WeightRoute
from slime_core.weights import hashing
from slime_core.weights.shards import Shards
from slime_core.weights.transports import disk
from slime_core.weights.transports.buckets import Staging, Tally, TensorPart, lay_out, stream

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def disk_route(folder, **more):
    return WeightRoute(**{"transport": "disk", "dtype": "bfloat16", "folder": str(folder), **more})


# -- buckets


def test_buckets_hold_what_fits_and_a_larger_tensor_has_one_of_its_own():
    parts = [part for source in sources_of(tensors_of()) for part in source.parts]
    found = lay_out(parts, "float32", most=1100)
    assert [[slot.name for slot in bucket.slots] for bucket in found] == [
        ["embed.weight"],
        ["a.q.weight", "a.k.weight", "a.norm"],
        ["b.weight"],
    ]
    assert [bucket.size for bucket in found] == [33 * 8 * 4, (64 + 32 + 7) * 4, 65 * 9 * 4]
    for bucket in found:
        ends = [0] + [slot.end for slot in bucket.slots]
        assert [slot.begin for slot in bucket.slots] == ends[:-1]
    assert [bucket.size for bucket in lay_out(parts, "bfloat16")] == [2 * (264 + 64 + 32 + 7 + 585)]


def test_what_sglang_fuses_within_one_request_is_never_split_between_two():
    kinds, layers = ("weight", "bias"), [f"model.layers.{n}.self_attn." for n in range(2)]
    names = [f"{layer}{name}" for layer in layers for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")]
    parts = [TensorPart(f"{name}.{kind}", (2, 5), lambda whole: whole) for name in names for kind in kinds]
    for most in (1, 100, 10**6):
        buckets = lay_out(parts, "float32", most=most)
        places = {slot.name: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
        assert len(places) == len(parts)
        for layer, kind in product(layers, kinds):
            assert places[f"{layer}q_a_proj.{kind}"] == places[f"{layer}kv_a_proj_with_mqa.{kind}"]
    assert [bucket.size for bucket in lay_out(parts, "float32", most=1)] == [80, 80, 40, 40, 80, 80, 40, 40]


def test_a_name_that_comes_twice_and_an_unknown_dtype_are_errors():
    part = TensorPart("x", (2,), lambda whole: whole)
    with pytest.raises(TrainerError, match="x would be sent twice"):
        lay_out([part, part], "float32")
    with pytest.raises(TrainerError, match="not as float16"):
        lay_out([part], "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_staging_holds_the_cast_bytes_at_addresses_that_stay(dtype, monkeypatch):
    monkeypatch.setattr("slime_core.weights.transports.buckets.AT_ONCE", 300)  # several casts an update
    tensors = tensors_of()
    parts = [part for source in sources_of(tensors) for part in source.parts]
    staging = Staging(lay_out(parts, dtype, 600), lambda size: torch.full((size,), 255, dtype=torch.uint8))
    where = {name: view.data_ptr() for name, view in staging.views.items()}
    for seed in (0, 1):
        tensors = tensors_of(seed)
        staging.fill(stream(sources_of(tensors)))
        for name, view in staging.views.items():
            assert torch.equal(view, tensors[name].to(getattr(torch, dtype)))
    assert where == {name: view.data_ptr() for name, view in staging.views.items()}


def test_a_tally_gives_the_checksums_of_the_bytes_and_keeps_no_tensor_longer_than_needed():
    tensors = {name: t.bfloat16() for name, t in tensors_of().items()}
    route = WeightRoute(transport="disk", dtype="bfloat16", checks=(QK, TOP))
    tally = Tally(route, hashing.Checksums)
    for name, value in tensors.items():
        tally.add(name, value)
        assert set(tally._sources) <= {"a.q.weight"}
    assert tally.finish() == hashing.expected(tensors, (QK, TOP), torch.bfloat16)
    joined = torch.cat([tensors["a.q.weight"], tensors["a.k.weight"]])
    assert tally.finish() == {
        "a.qk.weight": hashing.checksum(joined),
        "embed.weight@1": hashing.checksum(tensors["embed.weight"][17:].contiguous()),
    }


def test_a_tally_knows_a_text_models_tensors_by_their_names_in_a_folder_with_layers_for_pictures():
    norm = RankTensor(name="model.norm.weight", pieces=(Piece(name="model.norm.weight"),))
    tally = Tally(WeightRoute(transport="disk", dtype="float32", checks=(norm,)), hashing.Checksums)
    tally.add_all({"model.language_model.norm.weight": torch.ones(3), "model.visual.norm.weight": torch.zeros(3)})
    assert tally.finish() == {norm.key: hashing.checksum(torch.ones(3))}


def test_a_check_of_a_tensor_that_is_not_sent_is_an_error_that_names_both():
    head = RankTensor(name="lm_head.weight", pieces=(Piece(name="lm_head.weight"),))
    tally = Tally(WeightRoute(transport="disk", dtype="bfloat16", checks=(head,)), hashing.Checksums)
    tally.add_all({name: t.bfloat16() for name, t in tensors_of().items()})
    with pytest.raises(TrainerError, match=r"lm_head\.weight was not sent, and the engine's lm_head\.weight"):
        tally.finish()


# -- disk


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", [4 << 30, 1100], ids=["one_file", "shards"])
def test_a_folder_holds_the_cast_bytes_config_and_index(tmp_path, monkeypatch, dtype, shard):
    monkeypatch.setattr(disk, "SHARD", shard)
    monkeypatch.setattr(disk, "PIECE", 96)  # several writers a tensor
    tensors, route = tensors_of(), disk_route(tmp_path / "w", dtype=dtype, checks=(QK, TOP))
    handle, fingerprints = sent(disk.DiskSender(CPU, {"config.json": "{}"}), tensors, route)
    folder = tmp_path / "w" / "v-4"
    assert handle == {"folder": str(folder)}
    cast = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == (1 if shard > 1100 else 3 if dtype == "float32" else 2)
    stored = {name: t for file in files for name, t in load_file(str(file)).items()}
    assert stored.keys() == cast.keys()
    for name, value in Shards.open(folder).items():
        assert torch.equal(value, cast[name])
        assert torch.equal(stored[name], cast[name])
    assert (folder / "config.json").read_text() == "{}"
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in cast.values())
    assert fingerprints == hashing.expected(cast, (QK, TOP), getattr(torch, dtype))
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v-4"]


def test_the_newest_two_folders_stay_and_leftovers_of_another_process_go(tmp_path):
    """Also of a run that was killed while it wrote: such a folder never has its final name."""
    for name in ("v-7", "v-8", ".v-9.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("keep")
    sender = disk.DiskSender(CPU, {})
    seen = []
    for version in (5, 6, 6, 7):
        handle, _ = sent(sender, tensors_of(version), disk_route(tmp_path), version)
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        assert handle["folder"] == str(tmp_path / {3: "v-6.2"}.get(len(seen), f"v-{version}"))
    assert seen == [
        ["mine.txt", "v-5"],
        ["mine.txt", "v-5", "v-6"],
        ["mine.txt", "v-6", "v-6.2"],
        ["mine.txt", "v-6.2", "v-7"],
    ]


def test_a_folder_has_its_name_only_when_it_is_whole(tmp_path):
    """Whoever looks while it is written finds nothing to read."""
    tensors = tensors_of()
    sources = sources_of(tensors)

    def looking():
        for item in stream(sources):
            assert [path.name for path in tmp_path.iterdir()] == [".v-4.tmp"]
            yield item

    sender = disk.DiskSender(CPU, {})
    route = disk_route(tmp_path)
    parts = [part for source in sources for part in source.parts]
    sender.send(parts, looking(), 4, route, Tally(route, hashing.Checksums))
    assert [path.name for path in tmp_path.iterdir()] == ["v-4"]


def test_a_write_that_breaks_off_leaves_nothing_and_the_next_one_works(tmp_path):
    tensors = tensors_of()
    sources = sources_of(tensors)
    parts = [part for source in sources for part in source.parts]

    def breaking():
        yield from list(stream(sources))[:2]
        raise ValueError("a gather failed")

    sender = disk.DiskSender(CPU, {})
    with pytest.raises(ValueError, match="a gather failed"):
        sender.send(parts, breaking(), 4, disk_route(tmp_path), Tally(disk_route(tmp_path), hashing.Checksums))
    assert list(tmp_path.iterdir()) == []
    assert sent(sender, tensors, disk_route(tmp_path))[0] == {"folder": str(tmp_path / "v-4")}


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, "STO109"), (errno.EROFS, "STO110"), (errno.EIO, "STO121")]
)
def test_a_disk_that_fails_is_told_by_its_code_and_leaves_nothing(tmp_path, monkeypatch, number, code):
    write, calls = os.pwrite, []

    def failing(fd, data, place):
        calls.append(place)
        if len(calls) == 4:
            raise OSError(number, os.strerror(number))
        return write(fd, data, place)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StorageError) as error:
        sent(disk.DiskSender(CPU, {}), tensors_of(), disk_route(tmp_path))
    assert error.value.code == code
    assert list(tmp_path.iterdir()) == []
