"""How each server of a run is started: slime's own options, [sglang], a group's, and its variables."""

import json

import pytest

from slime_core.config.schema import Config
from slime_core.errors import ConfigError
from slime_core.weights.fp8 import BlockFormat
from slime_sglang.command import command, commands
from slime_sglang.installation import Installation
from slime_sglang.options import OWN, Option
from slime_sglang.topology import ServerGroup, ServerPlace, topology

pytestmark = pytest.mark.unit

FLAGS = (
    *("trust_remote_code", "enable_deterministic_inference", "enable_memory_saver", "disable_radix_cache"),
    *("disable_overlap_schedule", "skip_server_warmup", "sleep_on_idle"),
)
VALUES = (
    *("attention_backend", "sampling_backend", "load_format", "dtype", "disaggregation_mode", "model_path", "device"),
    *("tp_size", "random_seed", "context_length", "pp_size", "mem_fraction_static", "json_model_override_args"),
    "speculative_algorithm",
)


def installed(*features, env=None, without=()):
    """An installation with these features, and a few options."""
    names = [name for name in (*FLAGS, *VALUES) if name not in without]
    options = {
        name: Option(
            name=name, flag=f"--{name.replace('_', '-')}", kind="flag" if name in FLAGS else "value", type="x"
        )
        for name in names
    }
    return Installation(
        python="/sglang/bin/python",
        env=env or {},
        version="0.5.23",
        options=options,
        features=frozenset({"disk_update", "memory_saver", *features}),
    )


def config_of(device="cpu", sglang=None, train=None, cluster=None, seed=5, **rollout):
    return Config.model_validate(
        {
            "seed": seed,
            "cluster": {"device": device, **(cluster or {})},
            "train": {"dtype": "float32", **(train or {})},
            "rollout": {"hf_checkpoint": "/m", "rollout_engine": "sglang", **rollout},
            "sglang": sglang or {},
        }
    )


def words_of(config, installation=None, number=0):
    found = commands(config, installation or installed(), topology(config))
    return found[number].arguments


def value(words, flag):
    return words[words.index(flag) + 1]


def test_a_server_on_a_cpu_gets_what_sglang_needs_there():
    found = commands(config_of(), installed(env={"A": "1"}), topology(config_of()))[0]
    assert found.env == {"SGLANG_USE_CPU_ENGINE": "1", "A": "1"}
    words = found.arguments
    assert (value(words, "--model-path"), value(words, "--tp-size"), value(words, "--device")) == ("/m", "1", "cpu")
    assert value(words, "--attention-backend") == "torch_native"
    assert {"--sleep-on-idle", "--skip-server-warmup"} <= set(words)
    assert value(words, "--dtype") == "float32"
    assert not {"--enable-memory-saver", "--trust-remote-code", "--context-length", "--load-format"} & set(words)


def test_options_of_the_user_win_over_those_that_slime_chooses():
    written = {"attention-backend": "intel_amx", "dtype": "bfloat16", "sleep_on_idle": False}
    words = words_of(config_of(sglang=written))
    assert words.count("--attention-backend") == words.count("--dtype") == 1
    assert (value(words, "--attention-backend"), value(words, "--dtype")) == ("intel_amx", "bfloat16")
    assert "--sleep-on-idle" not in words


def test_an_option_that_this_version_does_not_have_is_left_out():
    assert "--sleep-on-idle" not in words_of(config_of(), installed(without=["sleep_on_idle"]))


def test_keys_of_slime_become_options():
    config = config_of(
        device="cuda",
        rollout_deterministic=True,
        trust_remote_code=True,
        init_weights="random",
    )
    words = words_of(config)
    assert value(words, "--load-format") == "dummy"
    assert {"--enable-deterministic-inference", "--trust-remote-code", "--enable-memory-saver"} <= set(words)
    assert not {"--sleep-on-idle", "--attention-backend"} & set(words)


FP8 = BlockFormat((64, 64), ("lm_head",)).table()
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = {
    "format": "pack-quantized",
    "config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 32}}},
}


@pytest.mark.parametrize(
    ("stored", "kind", "overrides"),
    [
        (None, "none", None),
        (FP8, "fp8", None),
        (None, "fp8", {"quantization_config": BlockFormat().table()}),
        (INT4, "fp8", {"quantization_config": BlockFormat().table()}),
        (FP8, "none", {"quantization_config": None}),
        (INT4, "auto", {"quantization_config": None}),
        (NF4, "auto", {"quantization_config": None}),
    ],
)
def test_servers_are_told_how_weights_are_sent_where_their_folder_says_otherwise(tmp_path, stored, kind, overrides):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stored} if stored else {}))
    folder = {"hf_checkpoint": str(tmp_path), "rollout_quantization": kind}
    config = config_of(device="cuda", train={"dtype": "bfloat16"}, **folder)
    words = words_of(config)
    assert ("--load-format" in words) is bool(overrides)
    if overrides:
        assert value(words, "--load-format") == "dummy"
        assert json.loads(value(words, "--json-model-override-args")) == overrides
    fixed = commands(config, installed("bitsandbytes"), topology(config), fixed=True)[0].arguments
    assert not {"--load-format", "--json-model-override-args"} & set(fixed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_that_read_their_folder_as_it_is_are_refused_nf4_that_they_cannot_read(tmp_path, device):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NF4}))
    config = config_of(device=device, hf_checkpoint=str(tmp_path))
    with pytest.raises(ConfigError, match="nf4 of bitsandbytes") as caught:
        commands(config, installed(), topology(config), fixed=True)
    assert caught.value.code == "CFG04"
    assert ("pip install bitsandbytes" in caught.value.fix) is (device == "cuda")
    if device == "cuda":
        assert commands(config, installed("bitsandbytes"), topology(config), fixed=True)


def test_a_draft_model_is_refused_where_servers_start_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def words(kind, algorithm):
        folder = {"hf_checkpoint": str(tmp_path), "rollout_quantization": kind}
        table = {"speculative-algorithm": algorithm}
        return words_of(config_of(device="cuda", sglang=table, train={"dtype": "bfloat16"}, **folder))

    for algorithm in ("EAGLE", "NEXTN"):
        with pytest.raises(ConfigError, match=f"speculative_algorithm = {algorithm} with weights") as caught:
            words("fp8", algorithm)
        assert caught.value.code == "CFG04"
        assert "--load-format" not in words("none", algorithm)
    assert value(words("fp8", "NGRAM"), "--load-format") == "dummy"


@pytest.mark.parametrize(
    ("text", "wanted", "given"),
    [
        ('{"max_position_embeddings": 1024}', 512, "520"),
        ('{"text_config": {"max_position_embeddings": 1024}}', 1016, "1024"),
        ('{"max_position_embeddings": 1024}', 1017, None),
        ('{"max_position_embeddings": 1024}', 0, None),
        ("[]", 512, None),
    ],
)
def test_a_shorter_context_leaves_the_positions_that_sglang_keeps(tmp_path, text, wanted, given):
    (tmp_path / "config.json").write_text(text)
    words = words_of(config_of(hf_checkpoint=str(tmp_path), rollout_max_context_len=wanted))
    assert (value(words, "--context-length") if "--context-length" in words else None) == given


def test_every_server_has_gpus_and_a_seed_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = config_of(device="cuda", cluster={"actor_num_gpus_per_node": 4}, rollout_num_gpus_per_engine=2)
    found = commands(config, installed(), topology(config))
    assert [how.env["CUDA_VISIBLE_DEVICES"] for how in found.values()] == ["4,5", "6,7"]
    assert {value(how.arguments, "--tp-size") for how in found.values()} == {"2"}
    assert len({value(how.arguments, "--random-seed") for how in found.values()}) == 2
    assert found == commands(config, installed(), topology(config))


def test_a_large_seed_of_a_run_still_fits_sglangs():
    assert 0 <= int(value(words_of(config_of(seed=2**63 - 1)), "--random-seed")) < 2**31


def group_of(**more):
    kind = {"name": "g", "role": "policy", "model": "/m", "servers": (ServerPlace(number=0, gpus=(0, 1)),)}
    return ServerGroup(**(kind | more))


def test_a_groups_options_and_variables_lie_over_the_tables():
    group = group_of(options={"mem-fraction-static": 0.5, "disable_radix_cache": False}, env={"A": "2"})
    config = config_of(device="cuda", sglang={"mem_fraction_static": 0.9, "disable_radix_cache": True})
    found = command(config, installed(env={"A": "1", "B": "1"}), group, group.servers[0])
    assert found.arguments.count("--mem-fraction-static") == 1
    assert value(found.arguments, "--mem-fraction-static") == "0.5"
    assert "--disable-radix-cache" not in found.arguments
    assert found.env == {"A": "2", "B": "1", "CUDA_VISIBLE_DEVICES": found.env["CUDA_VISIBLE_DEVICES"]}


def test_a_frozen_group_is_never_filled_or_emptied():
    group = group_of(role="reward", model="/judge")
    config = config_of(device="cuda", init_weights="random", rollout_max_context_len=64)
    words = command(config, installed(), group, group.servers[0]).arguments
    assert value(words, "--model-path") == "/judge"
    assert not {"--load-format", "--enable-memory-saver", "--context-length", "--dtype"} & set(words)


def test_a_prefill_group_is_told_so():
    group = group_of(mode="prefill")
    words = command(config_of(device="cuda"), installed(), group, group.servers[0]).arguments
    assert value(words, "--disaggregation-mode") == "prefill"


def test_a_fault_in_a_groups_options_is_named_with_its_place():
    group = group_of(options={"tp_size": 2}, where="servers.toml:7")
    with pytest.raises(ConfigError) as caught:
        command(config_of(), installed(), group, group.servers[0])
    assert (caught.value.code, caught.value.where) == ("CFG04", "servers.toml:7, options.tp_size")
    assert caught.value.fix == OWN["tp_size"]


def test_a_feature_that_the_installation_lacks_is_refused():
    shared = config_of(device="cuda")
    bare = installed()
    poor = Installation(**{**{k: getattr(bare, k) for k in bare.__slots__}, "features": frozenset({"disk_update"})})
    with pytest.raises(ConfigError, match="torch_memory_saver is not installed") as caught:
        commands(shared, poor, topology(shared))
    assert caught.value.fix == "/sglang/bin/python -m pip install torch_memory_saver   or   --no-offload-rollout"
    wired = config_of(device="cuda", cluster={"colocate": False}, rollout_num_gpus=1, update_weight_transport="nccl")
    with pytest.raises(ConfigError, match="takes no weights by nccl"):
        commands(wired, installed(), topology(wired))
