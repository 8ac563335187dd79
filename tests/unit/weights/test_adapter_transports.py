"""Adapters on their way to an engine: folders that peft reads, and buffers in the memory of the host."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from slime_core.types import WeightRoute
from slime_core.weights.transports.adapters import AdapterSenders
from slime_core.weights.transports.buckets import Staging, TensorSource, lay_out, one_part
from slime_core.weights.transports.senders import Senders

pytestmark = pytest.mark.unit

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False}
Q = "model.layers.0.self_attn.q_proj"


def factors(seed):
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{Q}.lora_A.weight": torch.randn(4, 16, generator=draw),
        f"{Q}.lora_B.weight": torch.randn(8, 4, generator=draw),
    }


def sources(tensors, gathered=None):
    def gather(name):
        if gathered is not None:
            gathered.append(name)
        return tensors[name]

    return [TensorSource(one_part(name, t.shape), lambda name=name: gather(name)) for name, t in tensors.items()]


class HostSender:
    """The sender of shared memory, without another process: what it holds is in ``views``."""

    def __init__(self, device):
        assert device.type == "cpu"
        self.staging = None

    def send(self, parts, tensors, version, route, tally):
        self.staging = self.staging or Staging(
            lay_out(parts, route.dtype), lambda size: torch.empty(size, dtype=torch.uint8)
        )
        self.staging.fill(tensors)
        return {"buckets": [bucket.described() for bucket in self.staging.buckets], "views": self.staging.views}

    def drop(self):
        self.staging = None


def test_a_folder_a_version_holds_each_adapter_as_peft_writes_it(tmp_path):
    route = WeightRoute(transport="disk", dtype="bfloat16", folder=str(tmp_path), base=False)
    stale = tmp_path / "adapters" / "v-9"
    stale.mkdir(parents=True)
    senders = AdapterSenders(lambda device: pytest.fail("nothing goes by memory"))
    sent = {}
    for version in (1, 2, 3, 3):
        named = {
            "solver": (CONFIG, sources(factors(version))),
            "critic": ({**CONFIG, "use_rslora": True}, sources(factors(7))),
        }
        sent = senders.send(named, version, route)
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["v-3", "v-3.1"]
    assert sent["critic"]["config"] == {**CONFIG, "lora_alpha": 8 * math.sqrt(4)}, "alpha / r = 8 / sqrt(4)"
    for name, seed in (("solver", 3), ("critic", 7)):
        stored = load_file(f"{sent[name]['folder']}/adapter_model.safetensors")
        assert stored.keys() == {f"base_model.model.{part}" for part in factors(seed)}
        assert all(torch.equal(stored[f"base_model.model.{part}"], t.bfloat16()) for part, t in factors(seed).items())
        with open(f"{sent[name]['folder']}/adapter_config.json") as file:
            assert json.load(file) == sent[name]["config"]


def test_buffers_of_an_adapter_take_turns_so_that_an_engine_may_still_read_versions_before():
    senders = AdapterSenders(HostSender)
    route = WeightRoute(transport="tensor", dtype="float32", base=False)
    sent = [senders.send({"a": (CONFIG, sources(factors(version)))}, version, route)["a"] for version in (1, 2, 3, 4)]
    assert [part for bucket in sent[0]["buckets"] for part in bucket["names"]] == list(factors(1))
    for version, handle in zip((2, 3, 4), sent[1:], strict=True):
        assert all(torch.equal(handle["views"][name], tensor) for name, tensor in factors(version).items())
    assert all(sent[0]["views"][name] is sent[3]["views"][name] for name in factors(1)), "memory is kept"


def test_an_update_has_the_base_where_the_engine_lacks_it_and_every_rank_gathers_everything(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    base = {"model.norm.weight": torch.ones(3)}
    for rank in (0, 1):
        for with_base in (True, False):
            gathered = []
            senders = Senders(torch.device("cpu"), tmp_path, config=None)
            route = WeightRoute(transport="disk", dtype="float32", folder=str(tmp_path / str(rank)), base=with_base)
            adapters = {"a": (CONFIG, sources(factors(1), gathered))}
            update = senders.publish(
                sources(base, gathered) if with_base else [], 1, route, rank=rank, adapters=adapters
            )
            assert gathered == [*(base if with_base else ()), *factors(1)]
            if not rank:
                assert ("folder" in update.handle) is with_base
                assert update.handle["adapters"].keys() == {"a"}
