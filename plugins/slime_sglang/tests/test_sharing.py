"""Whether servers give memory back to the trainer: by the size of its state, and what a person wrote."""

import json

import pytest
import torch
from test_command import config_of, installed, words_of

from slime_core.weights.shards import header
from slime_sglang import sharing

pytestmark = pytest.mark.unit

GPU = 80 << 30


def folder(path, parameters):
    """A model folder of so many parameters in bfloat16, none of which is there."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    text = header([("weight", torch.bfloat16, [parameters])])
    with (path / "model.safetensors").open("wb") as file:
        file.write(text)
        file.truncate(len(text) + 2 * parameters)
    return str(path)


def test_a_small_models_state_stays_and_a_large_ones_goes(tmp_path):
    small, large = folder(tmp_path / "s", 135_000_000), folder(tmp_path / "l", 4_000_000_000)
    both = [config_of("cuda", hf_checkpoint=path) for path in (small, large)]
    assert [sharing.gives_memory(config, (), GPU) for config in both] == [False, True]
    assert sharing.state_bytes(both[0]) == 18 * 135_000_000
    with_reference = config_of("cuda", hf_checkpoint=small, train={"ref_load": large})
    assert sharing.gives_memory(with_reference, (), GPU), "its reference is as large as it is"
    for train, models in (
        ({"kl_loss_coef": 0.1}, 2),
        ({"advantage_estimator": "ppo"}, 2),
        ({"critic_load": small}, 2),
    ):
        config = config_of("cuda", hf_checkpoint=small, train=train)
        assert sharing.state_bytes(config) == models * 18 * 135_000_000, "the policy's first weights count again"


@pytest.mark.parametrize("name", ["mem_fraction_static", "mem-fraction-static", "max_total_tokens"])
def test_memory_that_a_person_planned_is_given_as_asked(name, tmp_path):
    config = config_of("cuda", hf_checkpoint=folder(tmp_path / "s", 135_000_000))
    assert sharing.gives_memory(config, {name: 1}, GPU)


@pytest.mark.parametrize("cluster", [{"colocate": False}, {"offload_rollout": False}])
def test_nobody_gives_memory_unasked(cluster, tmp_path):
    config = config_of("cuda", hf_checkpoint=folder(tmp_path / "l", 4_000_000_000), cluster=cluster)
    assert not sharing.gives_memory(config, (), GPU)


def test_a_size_that_is_not_known_gives():
    assert sharing.gives_memory(config_of("cuda", hf_checkpoint="/nowhere"), (), GPU)
    assert sharing.gives_memory(config_of("cuda"), ())


def test_a_server_that_keeps_its_memory_takes_a_share_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sharing, "gpu_bytes", lambda config: GPU)
    small = config_of("cuda", hf_checkpoint=folder(tmp_path / "s", 135_000_000))
    words = words_of(small, installed())
    assert words[words.index("--mem-fraction-static") + 1] == repr(sharing.SHARE)
    assert "--enable-memory-saver" not in words, words
    large = config_of("cuda", hf_checkpoint=folder(tmp_path / "l", 4_000_000_000))
    assert "--enable-memory-saver" in words_of(large)
    assert "--mem-fraction-static" not in words_of(large)


def test_options_of_one_group_of_servers_plan_the_memory_of_all(tmp_path):
    groups = tmp_path / "engines.toml"
    groups.write_text('[[group]]\nname = "policy"\ngpus = 1\noptions = { mem_fraction_static = 0.8 }\n')
    config = config_of("cuda", hf_checkpoint=folder(tmp_path / "s", 135_000_000), engine_topology=str(groups))
    assert sharing.gives_memory(config, sharing.options_set(config), GPU)
