"""slime's args and its Sample."""

import base64
import copy
import pickle
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from slime_core.compat.flat import flat
from slime_core.compat.sample import Sample, plain
from slime_core.compat.session import CompatSession
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.sections.evaluation import EvalSection
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.sections.train import TrainSection
from slime_core.context import Context
from slime_core.errors import ConfigError
from slime_core.plugins import load_plugins
from slime_core.types import Sample as CoreSample, Status

pytestmark = pytest.mark.unit


def args_of(**sections):
    return CompatSession().args(Config(**sections))


def test_every_core_key_is_there_under_its_own_name():
    args = args_of()
    names = [name for section in SECTIONS for name in type(getattr(Config(), section)).model_fields]
    assert len(names) == len(set(names)) > 100
    assert all(hasattr(args, name) and name in args for name in names)


@pytest.mark.parametrize(
    ("sections", "name", "value"),
    [
        ({}, "rollout_max_context_len", None),
        ({}, "rm_type", None),
        ({}, "rollout_stop", None),
        ({"rollout": RolloutSection(rollout_stop=("a",))}, "rollout_stop", ["a"]),
        ({}, "rollout_top_k", -1),
        ({"rollout": RolloutSection(rollout_top_k=5)}, "rollout_top_k", 5),
        ({"train": TrainSection(eps_clip=0.3)}, "eps_clip_high", 0.3),
        ({"rollout": RolloutSection(rollout_max_response_len=9)}, "eval_max_response_len", 9),
        ({"eval": EvalSection(eval_max_response_len=3)}, "eval_max_response_len", 3),
        ({"seed": 11}, "rollout_seed", 11),
        ({}, "partial_rollout", False),
        ({"train": TrainSection(kl_loss_coef=0.1)}, "use_kl_loss", True),
        ({"train": TrainSection(custom_tis_function_path="f.py:f")}, "use_tis", False),
        ({"train": TrainSection(custom_tis_function_path="f.py:f", use_tis=True)}, "use_tis", True),
        ({"train": TrainSection(loss_aggregation="token_mean")}, "calculate_per_token_loss", True),
        ({}, "sglang_server_concurrency", 256),
        ({"rollout": RolloutSection(rollout_engine="sglang")}, "sglang_server_concurrency", 512),
        ({"rollout": RolloutSection(rollout_num_gpus_per_engine=2)}, "rollout_num_gpus_per_engine", 2),
        ({"rollout": RolloutSection(rollout_num_gpus_per_engine=2)}, "sglang_tp_size", 2),
        ({"rollout": RolloutSection(rollout_request_timeout=9.0)}, "sglang_router_request_timeout_secs", 9.0),
        ({"rollout": RolloutSection(rollout_deterministic=True)}, "sglang_enable_deterministic_inference", True),
        ({"rollout": RolloutSection(engine_topology="f.toml")}, "sglang_config", "f.toml"),
        ({"rollout": RolloutSection(rollout_engine="sglang")}, "use_fault_tolerance", True),
        ({"rollout": RolloutSection(rollout_external_engine_addrs=("http://h:1",))}, "rollout_external", True),
        ({"sglang": {"mem-fraction-static": 0.5}}, "sglang_mem_fraction_static", 0.5),
        ({}, "sglang_dp_size", 1),
        ({"sglang": {"dp_size": 2}}, "sglang_dp_size", 2),
        ({}, "rollout_global_dataset", True),
        ({}, "rm_url", None),
        ({"plugin": {"rm_math": {"rm_url": "http://h:1/reward"}}}, "rm_url", "http://h:1/reward"),
        ({}, "loss_mask_type", "qwen"),
        ({"data": {"loss_mask_type": "qwen3"}}, "loss_mask_type", "qwen3"),
        ({"train": TrainSection(gae_gamma=0.9)}, "gamma", 0.9),
        ({"train": TrainSection(opd_kl_coef=0.5, teacher_place="engine")}, "opd_type", "sglang"),
        ({}, "use_opd", False),
        ({"train": TrainSection(advantage_estimator="ppo")}, "use_critic", True),
        ({"reward": {"reward_key": "score"}}, "eval_reward_key", "score"),
        ({"data": {"input_key": "question"}}, "eval_input_key", "question"),
        ({}, "num_epoch", None),
        ({}, "use_routing_replay", False),
        ({}, "use_dynamic_batch_size", True),
    ],
)
def test_keys_mean_what_they_mean_in_slime(sections, name, value):
    assert getattr(args_of(**sections), name) == value


def test_what_a_function_sets_in_args_the_functions_after_it_see_and_the_config_does_not(caplog):
    session, configs = CompatSession(), [Config(), Config(seed=1)]
    args, other = (session.args(config) for config in configs)
    for value in (1.0, 2.0):
        args.lr = value
    args.results = {"solver": []}
    args.apply_chat_template_kwargs["enable_thinking"] = False
    later = session.args(Config(seed=2))
    assert [a.lr for a in (args, other, later, session.args(configs[0]))] == [2.0] * 4
    assert later.results is args.results
    assert configs[0].train.lr == TrainSection().lr
    assert configs[0].data.apply_chat_template_kwargs == {}
    keys = ("args.lr", "args.results")
    told = [record.getMessage() for record in caplog.records]
    assert len({record.once for record in caplog.records}) == 2, "each name and function is told once a run"
    assert all("test_what_a_function_sets" in text and "(test_args_and_sample.py:" in text for text in told)
    assert all(any(key in text for text in told) for key in keys)


def pickled(args):
    return pickle.loads(pickle.dumps(args))  # noqa: S301 - of our own process


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_args_is_the_functions_own(duplicate):
    args = args_of(rollout=RolloutSection(rollout_stop=("a",)))
    args.sampling_params = {"temperature": 1.0}
    own = duplicate(args)
    own.lr = 1.0
    own.extra = copy.deepcopy(own)
    assert (own.lr, own.extra.lr, own.rollout_stop, own.sampling_params) == (1.0, 1.0, ["a"], {"temperature": 1.0})
    assert args.lr == TrainSection().lr
    assert not hasattr(args, "extra")
    assert own.sglang_router_ip == "127.0.0.1"
    assert own.rank == 0


def test_args_read_like_slimes_namespace():
    args = args_of()
    assert isinstance(args, Namespace)
    assert vars(args)["lr"] == args.lr == getattr(args, "lr", 0)
    assert Namespace(**vars(args)).n_samples_per_prompt == args.n_samples_per_prompt
    args.mine = 3
    assert "mine" in args
    del args.mine
    assert getattr(args, "mine", None) is None


def test_args_describe_the_evaluation_sets():
    tasks = [{"name": "own", "prompt_data": "own.jsonl", "reward": "judge.py:fn", "temperature": 0.2, "top_k": 0}]
    section = {"eval_prompt_data": ("aime", "aime.jsonl"), "eval_tasks": tasks, "eval_temperature": 1.0}
    args = args_of(eval=section, reward={"rm_type": "math"}, data={"input_key": "question"})
    aime, own = args.eval_datasets
    assert (aime.name, aime.path, aime.temperature, aime.top_k, aime.rm_type) == (
        "aime",
        "aime.jsonl",
        1.0,
        -1,
        "math",
    )
    assert (own.name, own.temperature, own.top_k, own.custom_rm_path) == ("own", 0.2, -1, "judge.py:fn")
    assert (own.input_key, own.n_samples_per_eval_prompt, own.max_response_len) == ("question", 1, 256)
    assert args_of().eval_datasets == []


def test_args_know_where_a_run_writes_and_the_rank_they_are_read_in(tmp_path):
    session, config = CompatSession(), Config(cluster={"actor_num_nodes": 2, "actor_num_gpus_per_node": 4})
    assert session.args(config).save is None
    args = session.args(config, Context(config=config, run_dir=tmp_path))
    assert (args.save, args.rank, args.local_rank, args.world_size) == (str(tmp_path), 0, 0, 8)


def test_under_megatron_args_have_its_layout_and_keys():
    keys = {"tensor-model-parallel-size": 2, "pipeline_model_parallel_size": 4, "num_layers": 28}
    cluster = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}
    args = args_of(train=TrainSection(train_backend="megatron"), megatron=keys, cluster=cluster)
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    assert (*sizes, args.num_layers) == (2, 4, 1, 28)
    assert (args.world_size, args.data_parallel_size, args.expert_tensor_parallel_size) == (16, 2, 2)
    fsdp = args_of(megatron=keys, cluster=cluster)
    assert (fsdp.tensor_model_parallel_size, fsdp.data_parallel_size) == (1, 16), "FSDP splits no tensor"


def test_an_unknown_name_is_an_attribute_error_with_the_nearest():
    args = args_of()
    assert getattr(args, "my_own_flag", 3) == 3
    assert not hasattr(args, "my_own_flag")
    assert "my_own_flag" not in args
    with pytest.raises(AttributeError, match="did you mean 'rollout_temperature'"):
        args.rollout_temprature  # noqa: B018


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("more.toml", "max_turns = 3\ntools = ['a']"),
        ("more.json", '{"max_turns": 3, "tools": ["a"]}'),
        ("more.yaml", "max_turns: 3\ntools: [a]"),
    ],
    ids=["toml", "json", "yaml"],
)
def test_a_file_of_more_keys_is_read_into_args(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    args = args_of(rollout=RolloutSection(custom_config_path=str(tmp_path / name)))
    assert (args.max_turns, args.tools, args.lr) == (3, ["a"], TrainSection().lr)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("more.toml", None, "CFG05"),
        ("more.toml", "x = = 1", "CFG06"),
        ("more.yaml", "x: [", "CFG06"),
        ("more.json", "[1]", "CFG06"),
        ("more.txt", "x", "CFG06"),
    ],
    ids=["missing", "bad toml", "bad yaml", "a list", "another kind"],
)
def test_a_file_of_more_keys_that_cannot_be_used_is_refused_at_start(tmp_path, name, text, code):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plugins(Config(rollout=RolloutSection(custom_config_path=str(tmp_path / name))))
    assert caught.value.code == code


def test_where_sglang_lives_is_no_option_of_it():
    assert {"sglang_python", "sglang_env"} & set(flat(Config(sglang={"python": "p", "env": {"A": "1"}}))) == set()


def test_flat_is_a_function_of_the_config_alone():
    assert flat(Config()) == flat(Config())


def test_a_slime_sample_is_a_sample_with_room_for_more():
    sample = Sample(prompt="1+1=", tool_calls=2)
    assert isinstance(sample, CoreSample)
    assert (sample.prompt, sample.tool_calls, sample.status) == ("1+1=", 2, Sample.Status.PENDING)
    sample.anything = [1]
    assert sample.to_dict()["anything"] == [1]
    assert "anything" not in CoreSample.to_dict(sample)
    assert CoreSample.from_dict(CoreSample.to_dict(sample)).prompt == "1+1="
    assert Sample.from_dict({**sample.to_dict(), "anything": 3}).anything == 3
    assert copy.deepcopy(sample).anything == [1]
    assert (sample.to_dict()["non_generation_time"], sample.to_dict()["generate_function_path"]) == (0.0, None)
    judged = Sample(custom_rm_path="judge.fn", non_generation_time=2.0, apply_chat_template_kwargs={"tools": []})
    judged.prefix_cache_info.cached_tokens = 3
    changed = replace(judged, prompt="2+2=")
    assert changed.to_dict() == {**judged.to_dict(), "prompt": "2+2="}, "slime's fields stay in a changed copy"


def test_a_sample_counts_the_caches_and_the_speculation_of_its_turns():
    sample = Sample(rollout_routed_experts=[[0, 1]], weight_versions=["v1"])
    speculating = Namespace(sglang_speculative_algorithm="EAGLE")
    end = {"type": "stop"}
    turn = {"prompt_tokens": 100, "cached_tokens": 25, "spec_draft_token_num": 4, "spec_accept_token_num": 3}
    sample.append_response_tokens(meta_info={**turn, "finish_reason": end, "weight_version": "v2"})
    sample.append_response_tokens(speculating, meta_info={**turn, "finish_reason": end, "completion_tokens": 6})
    sample.append_response_tokens(speculating, meta_info=turn)  # a part of a stream: no end, nothing counted
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.prefix_cache_hit_rate) == (50, 0.25)
    assert (sample.spec_info.spec_accept_rate, sample.spec_info.completion_token_num) == (0.75, 6)
    assert (sample.spec_info.spec_accept_length, Sample().prefix_cache_info.prefix_cache_hit_rate) == (0.0, 0.0)
    assert (sample.weight_versions, sample.status) == (["v1", "v2"], Status.COMPLETED)
    with pytest.raises(ValueError, match="that do not train have no log-probs"):
        sample.append_response_tokens(tokens=[7], log_probs=[-0.5], trainable=False)
    restored = Sample.from_dict(sample.to_dict())
    assert restored.to_dict() == sample.to_dict()
    assert isinstance(restored.spec_info, Sample.SpecInfo)
    counts = sample.spec_info.to_dict()
    assert counts == {
        "spec_accept_token_num": 3,
        "spec_draft_token_num": 4,
        "spec_verify_ct": 0,
        "completion_token_num": 6,
    }
    assert Sample.SpecInfo.from_dict({"spec_draft_token_num": 4}) == Sample.SpecInfo(spec_draft_token_num=4)
    assert restored.rollout_routed_experts == [[0, 1]]
    sample.append_response([7], [-0.5])
    assert plain(sample, 4).weight_versions == [4], "an engine's names of weights are no versions of this run"


def test_lists_that_a_function_holds_grow_with_the_response():
    sample = Sample(prompt="a", tokens=[5], loss_mask=[], rollout_log_probs=[])
    tokens, mask, log_probs = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    sample.append_response_tokens(None, tokens=[7, 8], log_probs=[-0.5, -0.25])
    sample.append_response_tokens(None, tokens=[9], trainable=False)
    assert (tokens, mask, log_probs) == ([5, 7, 8, 9], [1, 1, 0], [-0.5, -0.25, 0.0])


def test_an_append_takes_any_sequence_fills_what_is_short_and_changes_nothing_where_it_fails():
    sample = Sample(tokens=(5, 1, 2), response_length=2, rollout_log_probs=[], loss_mask=np.array([1, 0]))
    sample.append_response([7], [-0.5])
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([5, 1, 2, 7], [1, 0, 1], [0.0, 0.0, -0.5])
    with pytest.raises(ValueError, match="invalid literal"):
        sample.append_response([8, "x"], [-0.5, -0.5])
    assert len(sample.tokens) == 4
    sample.append_response(sample.tokens, mask=0)
    assert sample.tokens == [5, 1, 2, 7] * 2


def test_response_tokens_are_appended_as_slime_does():
    sample = Sample(tokens=[1])
    meta = {"finish_reason": {"type": "length"}, "weight_version": "4"}
    sample.append_response_tokens(None, tokens=[2, 3], log_probs=[-1.0, -2.0], meta_info=meta, text="ab")
    sample.append_response_tokens(None, tokens=[4], trainable=False)
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3, 4], [1, 1, 0], [-1.0, -2.0, 0.0])
    assert (sample.weight_versions, sample.status, sample.response) == ([4, 4, -1], Status.TRUNCATED, "ab")
    assert sample.effective_response_length == 2
    with pytest.raises(ValueError, match="without log-probs"):
        sample.append_response_tokens(None, tokens=[5])
    scripted = Sample(tokens=[1, 2], response_length=1)
    scripted.append_response_tokens(tokens=None, text="c")
    with pytest.raises(ValueError, match="follow 1 response tokens without log-probs"):
        scripted.append_response_tokens(tokens=[3], log_probs=[-1.0])
    assert (scripted.tokens, scripted.response, scripted.rollout_log_probs) == ([1, 2], "c", None)


@pytest.mark.parametrize(
    ("reward", "key", "value"),
    [(2, None, 2.0), ({"a": 1, "b": 3}, "b", 3.0), (2.0, "b", 2.0), (None, None, None), ([1, 2], None, [1, 2])],
)
def test_the_reward_that_trains(reward, key, value):
    class Args:
        reward_key = key

    assert Sample(reward=reward).get_reward_value(Args()) == value


def experts_of(*rows, **more):
    """``meta_info`` of an answer whose tokens were sent to these experts, one a token in one layer."""
    text = base64.b64encode(np.array(rows, dtype="<i4").tobytes()).decode()
    return {"routed_experts": text, "routed_experts_shape": [1, 1], **more}


def test_the_experts_of_an_answer_go_behind_those_of_earlier_turns():
    """The second answer's begin again at the first token, the third's where it was asked to."""
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5], meta_info=experts_of(0, 1))
    sample.append_response_tokens(tokens=[8], trainable=False)
    sample.append_response_tokens(tokens=[9], log_probs=[-0.5], meta_info=experts_of(9, 9, 2, 3))
    sample.append_response_tokens(tokens=[4], log_probs=[-0.5], meta_info=experts_of(4, routed_experts_start_len=4))
    assert sample.rollout_routed_experts.ravel().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="3 routed experts came, not 6 x 1 x 1"):
        sample.append_response_tokens(tokens=[4], log_probs=[-0.5], meta_info=experts_of(1, 2, 3))
    args = SimpleNamespace(num_layers=1, moe_router_topk=2)
    for numbers in ([300, 2], [255, -1]):
        sample = Sample(tokens=[5])
        meta = {"routed_experts": base64.b64encode(np.array(numbers, dtype="<i4").tobytes()).decode()}
        sample.append_response_tokens(args, tokens=[7], log_probs=[-0.5], meta_info=meta)
        assert sample.rollout_routed_experts.tolist() == [[numbers]]
    with pytest.raises(ValueError, match="from token 3 on, and it lacks those before"):
        sample.append_response_tokens(
            tokens=[1, 2], log_probs=[-0.5] * 2, meta_info=experts_of(routed_experts_start_len=3)
        )


def test_experts_that_a_function_sets_become_an_array():
    sample = Sample(tokens=[5, 6], response_length=1, rollout_routed_experts=[[[1, 2]]])
    assert plain(sample, 0).rollout_routed_experts.shape == (1, 1, 2)
