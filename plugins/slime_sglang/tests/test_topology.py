"""Which servers there are and on which GPUs: from numbers, or from a file whose faults are named with their lines."""

import pytest

from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.errors import ConfigError
from slime_sglang.topology import Topology, parallel_size, topology, visible

pytestmark = pytest.mark.unit


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config with the machine settled, from sections' keys; ``file`` is the text of engine_topology."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()

    def make(file="", device="cuda", cluster=None, **rollout):
        if file:
            path = tmp_path / "servers.toml"
            path.write_bytes(file if isinstance(file, bytes) else file.encode())
            rollout["engine_topology"] = str(path)
        tables = {
            "cluster": {"device": device, **(cluster or {})},
            "rollout": {"hf_checkpoint": str(model), "rollout_engine": "sglang", **rollout},
        }
        return Config.model_validate(tables)

    return make


def gpus(found: Topology):
    return [[server.gpus for server in group.servers] for group in found.groups]


# -- from numbers


@pytest.mark.parametrize(
    ("cluster", "rollout", "placed"),
    [
        pytest.param({}, {}, [[(0,)]], id="one GPU that is shared"),
        pytest.param({"actor_num_gpus_per_node": 4}, {}, [[(0,), (1,), (2,), (3,)]], id="one server a shared GPU"),
        pytest.param(
            {"actor_num_gpus_per_node": 4}, {"rollout_num_gpus_per_engine": 2}, [[(0, 1), (2, 3)]], id="of two GPUs"
        ),
        pytest.param({"colocate": False}, {"rollout_num_gpus": 2}, [[(1,), (2,)]], id="behind the trainer's"),
        pytest.param(
            {"colocate": False, "actor_num_gpus_per_node": 4},
            {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4},
            [[(4, 5, 6, 7)]],
            id="one large one behind four",
        ),
        pytest.param({"actor_num_gpus_per_node": 4}, {"rollout_num_engines": 2}, [[(0,), (1,)]], id="fewer than GPUs"),
    ],
)
def test_numbers_of_gpus_become_servers(config, cluster, rollout, placed):
    found = topology(config(cluster=cluster, **rollout))
    assert gpus(found) == placed
    (group,) = found.groups
    assert (group.role, group.mode, group.frozen, found.roles) == ("policy", "regular", False, ())
    assert [server.number for server in found.servers] == list(range(len(placed[0])))


def test_a_cpu_has_one_server_and_no_gpus(config):
    assert gpus(topology(config(device="cpu"))) == [[()]]
    assert gpus(topology(config(device="cpu", rollout_num_engines=2))) == [[(), ()]]


def test_no_gpu_to_serve_on_is_refused(config):
    with pytest.raises(ConfigError, match="no GPU to serve on") as caught:
        topology(config(cluster={"colocate": False}))
    assert "--rollout-num-gpus N" in caught.value.fix


def test_more_gpus_than_there_are_is_refused_with_the_sum(config):
    settled = config(cluster={"colocate": False}, rollout_num_gpus=4)
    assert topology(settled, gpus=5)
    with pytest.raises(ConfigError, match="needs 5 GPUs and sees 4") as caught:
        topology(settled, gpus=4)
    assert caught.value.why == "4 x 1 for policy, and 1 for the trainer"


# -- from a file

FILE = """
[[group]]
name = "fast"
count = 2
options = { mem_fraction_static = 0.7 }

[[group]]
name = "wide"
gpus = 2
env = { NCCL_DEBUG = "WARN" }

[[group]]
role = "reward"
model = "MODEL"
"""


def test_groups_of_a_file_get_their_gpus_in_order(config, tmp_path):
    judge = tmp_path / "judge"
    judge.mkdir()
    found = topology(config(FILE.replace("MODEL", str(judge)), cluster={"colocate": False}))
    assert gpus(found) == [[(1,), (2,)], [(3, 4)], [(5,)]]
    assert [server.number for server in found.servers] == [0, 1, 2, 3]
    fast, wide, reward = found.groups
    assert found.of("policy") == (fast, wide)
    assert (found.roles, reward.frozen, reward.name) == (("reward",), True, "reward")
    assert (reward.model, fast.model) == (str(judge), str(tmp_path / "model"))
    assert (dict(fast.options), dict(wide.env), wide.gpus) == ({"mem_fraction_static": 0.7}, {"NCCL_DEBUG": "WARN"}, 2)
    assert (fast.where, wide.where) == ("servers.toml:2", "servers.toml:7")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("judge", "{0}/judge"), ("./judge", "{0}/judge"), ("~/judge", "{0}/judge"), ("org/judge", "org/judge")],
)
def test_a_models_path_starts_at_the_files_folder(config, tmp_path, monkeypatch, written, meant):
    (tmp_path / "judge").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    settled = config(f'[[group]]\n[[group]]\nrole = "reward"\nmodel = "{written}"\n')
    monkeypatch.chdir("/")
    (judge,) = topology(settled).of("reward")
    assert judge.model == meant.format(tmp_path)


def test_the_policys_model_may_be_named_again(config):
    assert topology(config('[[group]]\nmodel = "./model"\n')).of("policy")


@pytest.mark.parametrize(
    ("text", "code", "where", "what"),
    [
        pytest.param('[[group]]\nnme = "a"\n', "CFG01", "servers.toml:2", "unknown key", id="unknown key"),
        pytest.param('[[groups]]\nname = "a"\n', "CFG01", "servers.toml:1", "unknown key", id="unknown table"),
        pytest.param("[[group]]\n\ncount = 0\n", "CFG03", "servers.toml:3", "out of range", id="no server"),
        pytest.param('[[group]]\ncount = "2"\n', "CFG02", "servers.toml:2", "wrong type", id="a number as text"),
        pytest.param('[[group]]\nmode = "decoder"\n', "CFG03", "servers.toml:2", "out of range", id="unknown mode"),
        pytest.param('[[group]]\nrole = "My Role"\n', "CFG03", "servers.toml:2", "out of range", id="role's name"),
        pytest.param("[[group]]\nenv = { A = 1 }\n", "CFG02", "servers.toml:2", "wrong type", id="variable"),
        pytest.param("[[group]\n", "CFG06", "servers.toml", "is not TOML", id="no TOML"),
        pytest.param(b"\xff\xfe[[group]]", "CFG06", "servers.toml", "is not TOML", id="no UTF-8"),
        pytest.param("# nothing\n", "CFG04", "servers.toml", "no group serves the policy", id="empty"),
        pytest.param("[[group]]\n[[group]]\n", "CFG07", "servers.toml:2", "are named 'policy'", id="names"),
        pytest.param(
            '[[group]]\n[[group]]\nrole = "teacher"\n', "CFG02", "servers.toml:2", "names no model", id="no model"
        ),
        pytest.param(
            '[[group]]\nmodel = "/no/such/model"\n', "CFG04", "servers.toml:2", "another model", id="policy's model"
        ),
        pytest.param(
            '[[group]]\n[[group]]\nrole = "r"\nmodel = "/no/such/model"\n',
            "CFG05",
            "servers.toml:4",
            "no model folder",
            id="missing folder",
        ),
        pytest.param(
            '[[group]]\n[[group]]\nrole = "r"\nmodel = "./no"\n', "CFG05", "servers.toml:4", "no model folder", id="./"
        ),
        pytest.param(
            '[[group]]\n[[group]]\nname = "b"\nrole = "r"\nmodel = "x/a"\n'
            '[[group]]\nname = "c"\nrole = "r"\nmodel = "x/b"\n',
            "CFG04",
            "servers.toml:2",
            "different models",
            id="two models of a role",
        ),
        pytest.param('[[group]]\nmode = "decode"\n', "CFG04", "servers.toml:2", "mode decode", id="decode alone"),
        pytest.param(
            '[[group]]\n[[group]]\nname = "p"\nmode = "prefill"\n[[group]]\nname = "d"\nmode = "decode"\n',
            "CFG04",
            "servers.toml:1",
            "decode, prefill, regular",
            id="beside regular groups",
        ),
    ],
)
def test_a_fault_of_the_file_is_named_with_its_line(config, text, code, where, what):
    with pytest.raises(ConfigError) as caught:
        topology(config(text))
    error = caught.value
    assert error.code == code, str(error)
    assert what in str(error)
    assert where in error.where
    assert error.fix


def test_all_faults_of_a_file_are_named_at_once(config):
    with pytest.raises(ConfigError, match="2 problems") as caught:
        topology(config("[[group]]\ncount = 0\ngpus = 0\n"))
    assert "servers.toml:2" in caught.value.where
    assert "servers.toml:3" in caught.value.where


SPLIT = '[[group]]\nname = "p"\nmode = "prefill"\n[[group]]\nname = "d"\nmode = "decode"\n'


def test_prefill_and_decode_need_gpus_and_a_router_that_pairs_servers(config):
    with pytest.raises(ConfigError, match="need GPUs"):
        topology(config(SPLIT, device="cpu"))
    with pytest.raises(ConfigError, match="rollout_router = builtin") as caught:
        topology(config(SPLIT, rollout_router="builtin"))
    assert "servers.toml:3" in caught.value.where
    for router in ("auto", "sglang"):
        found = topology(config(SPLIT, rollout_router=router))
        assert [group.mode for group in found.of("policy")] == ["prefill", "decode"]
        assert [server.gpus for server in found.servers] == [(0,), (1,)]


def test_a_file_that_is_not_there_is_refused(config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        topology(config(engine_topology=str(tmp_path / "no.toml")))
    assert caught.value.code == "CFG05"
    with pytest.raises(ConfigError) as caught:
        topology(config(engine_topology=str(tmp_path)))
    assert caught.value.code == "CFG05"


def test_the_path_of_the_file_starts_at_the_recipes_folder(tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "servers.toml").write_text("[[group]]\n")
    (folder / "recipe.toml").write_text('[rollout]\nengine_topology = "servers.toml"\n')
    config = load_config(folder / "recipe.toml")
    assert config.rollout.engine_topology == str(folder / "servers.toml")
    (folder / "servers.toml").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        load_config(folder / "recipe.toml")


# -- GPUs and sizes


@pytest.mark.parametrize(
    ("mine", "asked", "shown"),
    [("", (0, 1), "0,1"), ("4,5,6", (1, 2), "5,6"), ("GPU-a, GPU-b", (1,), "GPU-b"), ("4", (1,), "1")],
)
def test_gpus_are_counted_among_those_that_the_run_sees(mine, asked, shown):
    assert visible(asked, {"CUDA_VISIBLE_DEVICES": mine}) == shown
    assert visible((0, 3), {}) == "0,3"


@pytest.mark.parametrize(
    ("count", "options", "size"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (8, {}, 8),
        (8, {"pp_size": 2}, 4),
        (8, {"pipeline-parallel-size": 2, "data-parallel-size": 2}, 2),
        (8, {"dp_size": 8, "enable_dp_attention": True}, 8),
        (8, {"dp_size": 8, "attn_dp_size": 8}, 8),
        (0, {"dp_size": 2}, 1),
    ],
)
def test_tensor_parallelism_takes_what_other_parallelism_leaves(count, options, size):
    assert parallel_size(count, options) == size


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"4 GPUs of a server do not divide by pp_size \* dp_size = 3 \* 1"):
        parallel_size(4, {"pp_size": 3})
