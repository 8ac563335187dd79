"""Which way weights take: by where both sides live, by what the installation can, by the torch of both sides."""

import asyncio
from importlib.metadata import version

import pytest

from slime_core.config.load import load_config
from slime_core.errors import ConfigError, EngineError
from slime_sglang.external import NEW
from slime_sglang.installation import Installation
from slime_sglang.model_servers import check_transport
from slime_sglang.router import Lane
from slime_sglang.start import unused
from slime_sglang.topology import ServerGroup, ServerPlace, Topology
from slime_sglang.weights import Ways, WeightRoutes, why_unmapped

pytestmark = pytest.mark.unit

OURS = version("torch")
OTHER = "1.7.1+cu101"


def ways(tmp_path, **more):
    return Ways(**{"model": None, "dtype": "float32", "features": NEW, "folder": tmp_path, "torch": OURS, **more})


@pytest.mark.parametrize(
    ("device", "shared", "wanted", "torch", "found"),
    [
        ("cpu", True, "auto", OURS, "disk"),
        ("cuda", True, "auto", OURS, "tensor"),
        ("cuda", True, "auto", f"{'.'.join(OURS.split('.')[:2])}.99+cu130", "tensor"),
        ("cuda", True, "auto", OTHER, "disk"),  # nccl takes one rank a GPU
        ("cuda", True, "auto", "", "disk"),
        ("cuda", False, "auto", OURS, "nccl"),
        ("cuda", False, "auto", OTHER, "nccl"),
        ("cuda", True, "disk", OTHER, "disk"),
        ("cuda", False, "nccl", OTHER, "nccl"),
    ],
)
def test_the_transport_follows_from_where_both_sides_live_and_their_torch(
    tmp_path, device, shared, wanted, torch, found
):
    assert ways(tmp_path, device=device, shared=shared, requested=wanted, torch=torch).transport == found


def test_a_server_beside_no_trainer_rank_gets_a_folder_and_that_is_said(tmp_path):
    notes = []
    apart = ways(tmp_path, device="cuda", places={})
    assert apart.transport == "disk"
    WeightRoutes(apart, notes.append)
    assert "no GPU that a trainer rank has" in notes[0]
    with pytest.raises(EngineError, match="ENG86"):
        _ = ways(tmp_path, device="cuda", places={}, requested="tensor").transport


def test_a_route_names_the_ranks_beside_the_first_whose_gpus_servers_share(tmp_path):
    def lane(number):
        return Lane(client=None, number=number, room=1)

    places = {0: (0, 1), 1: (2, 3), 2: (0,)}
    weights = WeightRoutes(ways(tmp_path, device="cuda", places=places))
    route = asyncio.run(weights.route("none", [lane(0), lane(1), lane(2)]))
    assert (route.transport, route.copies) == ("tensor", (1, 2, 3))
    assert asyncio.run(weights.route("none", [lane(2)])).copies == ()


@pytest.mark.parametrize(
    ("gpus", "world", "found"),
    [
        ([(0,), (1,)], 2, {0: (0,), 1: (1,)}),
        ([(0, 1), (2, 3)], 4, {0: (0, 1), 1: (2, 3)}),
        ([(0, 1)], 1, {0: (0, 0)}),
        ([(0, 1), (2, 3)], 3, {0: (0, 1), 1: (2, 2)}),
        ([(0,), (1,)], 1, {}),
        ([(), ()], 2, {0: (), 1: ()}),
    ],
)
def test_a_server_reads_from_the_rank_on_its_gpu_or_from_the_nearest_that_it_sees(gpus, world, found):
    servers = tuple(ServerPlace(number=number, gpus=each) for number, each in enumerate(gpus))
    group = ServerGroup(name="policy", role="policy", model="m", servers=servers)
    judge = ServerGroup(name="judge", role="reward", model="j", servers=(ServerPlace(number=9, gpus=(7,)),))
    assert Topology(groups=(group, judge)).beside(world) == found


def test_a_transport_that_the_installation_lacks_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="takes no weights by disk"):
        _ = ways(tmp_path, features=frozenset()).transport


def test_tensor_that_was_asked_for_and_cannot_work_is_refused_with_both_versions(tmp_path):
    with pytest.raises(EngineError, match="ENG86") as caught:
        _ = ways(tmp_path, device="cuda", requested="tensor", torch=OTHER).transport
    assert f"the servers have torch {OTHER} and the trainer {OURS}" in caught.value.why


@pytest.mark.parametrize(("torch", "said"), [(OTHER, OTHER), ("", "is not known")])
def test_a_transport_that_torchs_versions_exclude_is_refused_before_a_server_starts(torch, said):
    there = Installation(
        python="/sg/python", env={}, version="0.5.23", options={}, features=NEW, torch=torch
    )  # fmt: skip
    asked = load_config(None, ["--hf-checkpoint", ".", "--device", "cpu"])
    check_transport(asked, there)
    asked = asked.model_copy(
        update={"rollout": asked.rollout.model_copy(update={"update_weight_transport": "tensor"})}
    )
    with pytest.raises(ConfigError, match="CFG04") as caught:
        check_transport(asked, there)
    assert said in caught.value.why
    assert OURS in caught.value.why
    if torch:  # ranks on other machines may have it, whatever the driver has
        check_transport(asked, there, trainer=torch)


def test_a_trainer_elsewhere_has_a_torch_of_its_own(tmp_path):
    assert ways(tmp_path, device="cuda", torch=OTHER, trainer=OTHER).transport == "tensor"
    assert ways(tmp_path, device="cuda", trainer=OTHER).transport == "disk"


def test_weights_that_go_by_disk_for_torchs_versions_are_noted(tmp_path):
    notes = []
    WeightRoutes(ways(tmp_path, device="cuda", torch=OTHER), notes.append)
    WeightRoutes(ways(tmp_path, device="cuda"), notes.append)
    WeightRoutes(ways(tmp_path, device="cuda", torch=OTHER, shared=False), notes.append)
    WeightRoutes(ways(tmp_path, torch=OTHER), notes.append)
    assert [note.partition(":")[0] for note in notes] == [
        "weights go through a folder (disk) and not from memory to memory"
    ]
    assert OTHER in notes[0]


def test_patches_and_builds_of_a_minor_version_are_alike():
    assert why_unmapped("2.9.1+cu130", "2.9.0") == ""
    assert "both need the same minor version" in why_unmapped("2.9.1", "2.13.0")
    assert "both need the same minor version" in why_unmapped("2.1.0", "2.13.0")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"device": "cuda"}, ["update_weight_disk_dir", "update_weight_buffer_size"]),
        ({"device": "cuda", "shared": False}, ["update_weight_disk_dir"]),
        ({"device": "cuda", "torch": OTHER}, []),
        ({"device": "cpu"}, []),
    ],
)
def test_keys_of_another_way_than_auto_takes_are_said(tmp_path, more, said):
    flags = ["--update-weight-disk-dir", str(tmp_path), "--update-weight-buffer-size", "2097152"]
    asked = load_config(None, ["--hf-checkpoint", ".", "--rollout-engine", "sglang", *flags])
    assert [text.partition(":")[0] for text in unused(asked, ways(tmp_path, **more))] == said
    assert not list(unused(load_config(None, ["--hf-checkpoint", "."]), ways(tmp_path, **more)))
