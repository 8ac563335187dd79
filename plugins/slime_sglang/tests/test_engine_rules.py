"""Rules of rollout servers' keys: what contradicts, and what has no effect."""

import json

import pytest

from slime_core.backends import Planning
from slime_core.config import rules
from slime_core.config.fields import core_keys
from slime_core.config.load import read
from slime_core.config.problems import Origins
from slime_core.config.schema import Config
from slime_core.config.sections import fact
from slime_core.errors import ConfigError
from slime_sglang import rules as engine_rules
from slime_sglang.planning import plan

pytestmark = pytest.mark.unit


def config_of(cluster=None, sglang=None, engine="sglang", train=None, data=None, **rollout):
    tables = {"cluster": cluster or {}, "sglang": sglang or {}, "train": train or {}, "data": data or {}}
    return Config.model_validate({**tables, "rollout": {"rollout_engine": engine, **rollout}})


APART = {"colocate": False}
CPU, CUDA = {"device": "cpu"}, {"device": "cuda"}
ONE = ("http://10.0.0.1:30000",)


@pytest.mark.parametrize(
    ("cluster", "rollout", "what", "fix"),
    [
        pytest.param(
            {},
            {"rollout_external_engine_addrs": ONE, "rollout_num_gpus": 2},
            "rollout_num_gpus and rollout_external_engine_addrs are both set",
            "leave rollout_num_gpus out",
            id="addresses and GPUs",
        ),
        pytest.param(
            {},
            {"rollout_external_engine_addrs": ONE, "engine_topology": "f.toml"},
            "engine_topology and rollout_external_engine_addrs",
            "leave engine_topology out",
            id="addresses and a file",
        ),
        pytest.param(
            {},
            {"engine_topology": "f.toml", "rollout_num_engines": 2},
            "rollout_num_engines and engine_topology",
            "or the file",
            id="a file and numbers",
        ),
        pytest.param(
            {},
            {"rollout_external_engine_addrs": (*ONE, "http://10.0.0.1:30000/")},
            "appears twice",
            "remove one",
            id="one address twice",
        ),
        pytest.param(
            {},
            {"rollout_router": "sglang", "rollout_external_engine_addrs": ("https://h:1",)},
            "rollout_router = sglang with https:// addresses",
            "--rollout-router builtin",
            id="router",
        ),
        pytest.param(
            APART,
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "rollout_num_gpus = 3 does not divide into servers of rollout_num_gpus_per_engine = 2",
            "such as 2",
            id="GPUs do not divide",
        ),
        pytest.param(
            APART,
            {"rollout_num_gpus": 4, "rollout_num_engines": 3},
            "rollout_num_engines = 3 servers of 1 GPUs are not rollout_num_gpus = 4",
            "set rollout_num_gpus to 3",
            id="two counts",
        ),
        pytest.param(
            {**CUDA, "actor_num_gpus_per_node": 4},
            {"rollout_num_gpus_per_engine": 3},
            "the trainer's 4 GPUs do not divide",
            "a divisor of 4",
            id="shared GPUs do not divide",
        ),
        pytest.param(
            APART,
            {"rollout_num_gpus": 2, "min_healthy_engines": 3},
            "min_healthy_engines = 3 is more than the 2 that there are",
            "--min-healthy-engines 2",
            id="more healthy ones than there are",
        ),
        pytest.param(
            {},
            {"rollout_external_engine_addrs": ONE, "min_healthy_engines": 2},
            "more than the 1 that there are",
            "--min-healthy-engines 1",
            id="more healthy ones than addresses",
        ),
        pytest.param(
            CPU, {"min_healthy_engines": 2}, "more than the 1 that there are", "more servers", id="one server on a CPU"
        ),
        pytest.param(
            {**CUDA, "actor_num_gpus_per_node": 2},
            {"min_healthy_engines": 3},
            "more than the 2 that there are",
            "--min-healthy-engines 2",
            id="more healthy ones than shared GPUs",
        ),
        pytest.param(
            CPU, {"update_weight_transport": "tensor"}, "transport = tensor with device = cpu", "disk", id="tensor"
        ),
        pytest.param(
            CPU, {"update_weight_transport": "nccl"}, "transport = nccl with device = cpu", "disk", id="nccl"
        ),
        pytest.param(
            APART, {"update_weight_transport": "tensor"}, "tensor with colocate = false", "nccl", id="tensor apart"
        ),
        pytest.param({}, {"update_weight_transport": "nccl"}, "nccl with colocate = true", "tensor", id="nccl shared"),
        pytest.param(
            {},
            {"update_weight_transport": "tensor", "rollout_external_engine_addrs": ONE},
            "tensor with rollout_external_engine_addrs",
            "disk",
            id="tensor elsewhere",
        ),
        pytest.param(
            CPU,
            {"rollout_deterministic": True},
            "rollout_deterministic with device = cpu",
            "--rollout-engine local",
            id="deterministic on a CPU",
        ),
    ],
)
def test_each_contradiction_names_its_keys_and_the_way_out(cluster, rollout, what, fix):
    (problem,) = engine_rules.conflicts(config_of(cluster, **rollout))
    assert problem.code == "CFG04"
    assert what in problem.what
    assert fix in problem.fix
    assert problem.keys
    assert rules.conflicts(config_of(cluster, engine="local", **rollout)) == []


@pytest.mark.parametrize(
    ("cluster", "rollout"),
    [
        ({}, {}),
        (CPU, {"rollout_num_engines": 2, "min_healthy_engines": 2}),
        (APART, {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "rollout_num_engines": 2}),
        (APART, {"update_weight_transport": "nccl", "rollout_num_gpus": 1}),
        (CUDA, {"update_weight_transport": "tensor", "rollout_deterministic": True}),
        ({}, {"rollout_external_engine_addrs": ("https://a.example:443", "http://[::1]:30000/")}),
        ({}, {"rollout_external_engine_addrs": ONE, "update_weight_transport": "nccl"}),
        ({}, {"engine_topology": "f.toml", "min_healthy_engines": 9}),
    ],
)
def test_settings_that_hold_together_are_no_problem(cluster, rollout):
    assert list(engine_rules.conflicts(config_of(cluster, **rollout))) == []


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:30000",
        "http://10.0.0.1",
        "http://10.0.0.1:0",
        "http://10.0.0.1:99999",
        "http://10.0.0.1:30000/generate",
        "http://10.0.0.1:30000?x=1",
        "ftp://10.0.0.1:21",
        "http://:30000",
        "",
    ],
)
def test_an_external_engine_that_is_no_address_is_refused(address):
    (problem,) = engine_rules.conflicts(config_of(rollout_external_engine_addrs=(address,)))
    assert problem.code == "CFG03"
    assert "http://" in problem.fix


def test_a_password_in_an_address_is_refused_and_not_shown():
    (problem,) = engine_rules.conflicts(config_of(rollout_external_engine_addrs=("http://me:hunter2@h:1",)))
    assert "hunter2" not in str(problem)
    assert "rollout_engine_token_env" in problem.why


def test_sglang_says_no_experts_on_a_cpu():
    config = config_of(CPU)
    config = config.model_copy(update={"train": config.train.model_copy(update={"routing_replay": "rollout"})})
    (problem,) = engine_rules.conflicts(config)
    assert "routing_replay = rollout with device = cpu" in problem.what
    assert "--rollout-engine local" in problem.fix


@pytest.mark.parametrize("written", ["attention_backend", "attention-backend", "decode_attention_backend"])
def test_the_deterministic_mode_needs_an_attention_backend_that_can(written):
    (problem,) = engine_rules.conflicts(config_of(CUDA, {written: "torch_native"}, rollout_deterministic=True))
    assert f"sglang.{written} = torch_native" in problem.what
    assert "fa3" in problem.why
    assert not list(engine_rules.conflicts(config_of(CUDA, {written: "fa3"}, rollout_deterministic=True)))
    assert not list(engine_rules.conflicts(config_of(CUDA, {written: "torch_native"})))


def test_quantised_servers_cannot_be_compared_byte_by_byte():
    (problem,) = engine_rules.conflicts(config_of(sglang={"quantization": "fp8"}))
    assert "--check-weights off" in problem.fix
    assert not list(engine_rules.conflicts(config_of(sglang={"quantization": "fp8"}, check_weights="off")))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"cluster": CPU}, "device = cpu"),
        ({"train": {"dtype": "float32"}}, "dtype = float32"),
        ({"sglang": {"quantization": "fp8"}, "check_weights": "off"}, "sglang.quantization"),
        ({"sglang": {"json-model-override-args": "{}"}}, "sglang.json-model-override-args"),
    ],
)
def test_weights_in_fp8_need_a_gpu_and_nobody_else_who_quantises(more, what):
    fine = {"cluster": CUDA, "train": {"dtype": "bfloat16"}, "rollout_quantization": "fp8"}
    assert not list(engine_rules.conflicts(config_of(**fine)))
    (problem,) = engine_rules.conflicts(config_of(**{**fine, **more}))
    assert problem.what == f"rollout_quantization = fp8 with {what}"
    assert "--rollout-quantization none" in problem.fix


@pytest.mark.parametrize(
    ("capability", "kind", "refused"), [((10, 0), "fp8", 1), ((9, 0), "fp8", 0), ((10, 0), "none", 0)]
)
def test_a_gpu_whose_servers_round_scales_again_is_refused(monkeypatch, capability, kind, refused):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "B200")
    config = config_of(CUDA, {"python": "/no/python"}, train={"dtype": "bfloat16"}, rollout_quantization=kind)
    with pytest.raises(ConfigError) as caught:
        plan(Planning(config=config, origins=Origins(), plugins=None))
    assert refused == ("powers of two" in caught.value.why)
    assert refused or "/no/python" in str(caught.value)


def test_strings_that_end_a_response_need_a_tokenizer():
    (problem,) = engine_rules.conflicts(config_of(sglang={"skip-tokenizer-init": True}, rollout_stop=("x",)))
    assert "rollout_stop_token_ids" in problem.fix


# -- what has no effect


def test_keys_of_servers_without_servers_are_said():
    readers = ("servers", "servers or adapters")
    keys = {name: key for name, key in core_keys().items() if fact(key.info, "reader") in readers}
    kinds = {str: "x", bool: True, int: 1 << 21, float: 7.5, tuple: ("http://h:1",)}
    values = {name: kinds[type(key.info.default)] for name, key in keys.items()}
    values |= {"rollout_router": "builtin", "update_weight_transport": "disk", "pause_generation_mode": "abort"}
    values |= {"check_weights": "all"}
    assert {"rollout_num_gpus_per_engine", "server_concurrency", "canary_band"} < set(keys)
    (notice,) = rules.notices(config_of(engine="local", **values))
    assert notice == f"{', '.join(keys)}: no effect with rollout_engine = local; servers read them"


def test_embedded_engines_read_their_number_where_they_are_apart_or_on_other_machines():
    def named(cluster=None, **rollout):
        config = config_of(cluster, engine="local", rollout_num_gpus=1, rollout_num_engines=2, **rollout)
        return [notice.partition(":")[0] for notice in rules.notices(config) if "no effect" in notice]

    assert named() == ["rollout_num_gpus, rollout_num_engines"]
    assert named({"colocate": False}, max_staleness=1) == ["rollout_num_gpus"]
    assert named({"cluster_backend": "ray", "device": "cuda"}) == []


def test_options_of_sglang_without_sglang_are_said():
    notices = rules.notices(config_of(engine="local", sglang={"dtype": "auto"}, rollout_num_gpus=1))
    assert [text.partition(":")[0] for text in notices] == ["rollout_num_gpus", "[sglang] dtype"]
    assert rules.notices(config_of(engine="local")) == []


@pytest.mark.parametrize(
    ("rollout", "sglang", "said"),
    [
        ({"rollout_slots": 8}, {}, "rollout_slots: no effect"),
        ({"rollout_external_engine_addrs": ONE}, {"dtype": "auto"}, "[sglang]: no effect on servers that run already"),
        (
            {"rollout_external_engine_addrs": ONE},
            {"env": {"A": "1"}},
            "[sglang]: no effect on servers that run already",
        ),
        (
            {"rollout_external_engine_addrs": ONE, "rollout_max_restarts": 1},
            {},
            "rollout_max_restarts: slime starts no servers that run already; it is how often one may come back",
        ),
        (
            {"update_weight_buffer_size": 1 << 21, "update_weight_transport": "tensor"},
            {},
            "update_weight_buffer_size: no effect",
        ),
        ({"canary_band": 0.1, "debug_rollout_only": True}, {}, "canary_band: no effect with debug_rollout_only"),
        ({"rollout_external_engine_addrs": ONE}, {}, "travel in clear text"),
        ({"rollout_engine_token_env": "T"}, {}, "rollout_engine_token_env: no effect"),
        ({"rollout_engine_ca": "ca.pem"}, {}, "rollout_engine_ca: no effect"),
        (
            {"update_weight_disk_dir": "/d", "update_weight_transport": "tensor"},
            {},
            "update_weight_disk_dir: no effect",
        ),
        ({"pause_generation_mode": "abort"}, {}, "pause_generation_mode = abort: no effect with max_staleness = 0"),
        ({"pause_generation_mode": "in_place", "max_staleness": 1}, {}, "match neither version"),
        ({"rollout_top_p": 0.9}, {}, "rollout_top_p = 0.9: SGLang's log-probs are of the whole softmax"),
        ({"rollout_top_p": 0.9, "rollout_top_k": 5}, {}, "rollout_top_p = 0.9 and rollout_top_k = 5"),
        ({"rollout_temperature": 0.7}, {}, "rollout_temperature = 0.7: SGLang's log-probs are at this temperature"),
        ({}, {}, "seed has no effect on the tokens"),
        ({"max_staleness": 1}, {}, "lockstep repeats which weights made which group, not its tokens"),
    ],
)
def test_options_with_an_unexpected_effect_have_a_notice(rollout, sglang, said):
    assert [text for text in engine_rules.notices(config_of(sglang=sglang, **rollout)) if said in text]


def test_a_trained_tower_needs_a_variable_on_servers_that_run_already():
    def said(**train):
        texts = engine_rules.notices(config_of(train=train, rollout_external_engine_addrs=ONE))
        return [text for text in texts if "SGLANG_VLM_CACHE_SIZE_MB=0" in text]

    assert said(freeze_vision_tower=False)
    assert not said()


@pytest.mark.parametrize(
    ("family", "kind", "fault"),
    [
        ("smolvlm", "image", "a model of the family smolvlm"),
        ("qwen2_vl", "image", "a model of the family qwen2_vl"),
        ("qwen3_vl", "video", "multimodal_keys names video"),
        ("qwen2_5_vl", "images", None),
        ("qwen3", "image", None),  # of text: a function may want the references
    ],
)
def test_media_that_servers_would_refuse_are_refused_before_they_start(tmp_path, family, kind, fault):
    vision = {} if family == "qwen3" else {"vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **vision}))
    problems = [*engine_rules.conflicts(config_of(data={"multimodal_keys": {kind: "c"}}, hf_checkpoint=str(tmp_path)))]
    assert [fault in problem.what and "local" in problem.fix for problem in problems] == [True] * (fault is not None)
    assert not [*engine_rules.conflicts(config_of(hf_checkpoint=str(tmp_path)))]


def test_gpus_that_are_counted_on_a_cpu_are_said():
    told = list(engine_rules.notices(config_of(cluster={"device": "cpu"}, rollout_num_gpus=2)))
    assert [text for text in told if "rollout_num_gpus: no effect with device = cpu" in text]


@pytest.mark.parametrize(
    "rollout",
    [
        {"rollout_deterministic": True},
        {"rollout_deterministic": True, "pause_generation_mode": "abort", "max_staleness": 1},
        {"rollout_deterministic": True, "pause_generation_mode": "abort", "partial_rollout": True},
        {"rollout_deterministic": True, "rollout_external_engine_addrs": ("http://127.0.0.1:1", "https://h:1")},
    ],
)
def test_options_that_all_have_their_effect_have_no_notice(rollout):
    assert list(engine_rules.notices(config_of(**rollout))) == []


def test_the_loader_applies_these_rules(recipe, refused):
    path = recipe("[rollout]\nrollout_num_gpus = 3\nrollout_num_gpus_per_engine = 2\nrollout_engine = 'sglang'\n")
    error = refused(path)
    assert "recipe.toml:2" in error.where
    assert any("server_concurrency: no effect" in text for text in read(None, ["--server-concurrency", "8"]).notices)
