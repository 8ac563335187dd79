"""slime.utils.ppo_utils, slime.backends.megatron_utils and slime.observability as served, and Megatron's mpu."""

import asyncio
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime_compat.finder import Finder
from slime_compat.served import (
    context_parallel,
    corrections,
    loading,
    measures,
    objectives,
    rollout_checks,
    rollout_measures,
)
from slime_compat.served.http import get_rollout_num_engines
from slime_compat.served.timers import Timer, inverse_timer, timer, with_defer
from slime_compat.served.traces import build_sglang_meta_trace_attrs, trace_event, trace_function, trace_span
from slime_compat.served.tracking import log
from slime_core.compat.sample import Sample
from slime_core.config.presets import settle

pytestmark = pytest.mark.unit


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, *expected):
    return torch.allclose(actual, tensor(*expected).reshape(actual.shape), atol=1e-12)


def test_the_surrogate_is_clipped_above_below_and_for_negative_advantages():
    kl, advantages = -tensor(2, 2, 0.5, 1).log(), tensor(2, -2, 2, 1)
    loss, share = objectives.compute_policy_loss(kl, advantages, 0.2, 0.28)
    assert close(loss, -1.28 * 2, 4, -1, -1)
    assert share.tolist() == [1, 0, 0, 0]
    dual, _ = objectives.compute_policy_loss(kl, advantages, 0.2, 0.28, eps_clip_c=1.5)
    assert close(dual, -1.28 * 2, 3, -1, -1)
    with pytest.raises(ValueError, match="must be above 1"):
        objectives.compute_policy_loss(kl, advantages, 0.2, 0.2, 1.0)


def test_cispo_clips_the_weight_and_never_the_gradient():
    log_probs = tensor(-0.5, -1).requires_grad_()
    loss, share = objectives.compute_cispo_loss(-tensor(3, 0.5).log(), log_probs, tensor(1, -2), 0.2, 0.28)
    loss.sum().backward()
    assert close(loss.detach(), 1.28 * 0.5, -0.8 * 2)
    assert close(log_probs.grad, -1.28, 0.8 * 2)
    assert share.tolist() == [1, 1]


def test_kl_estimates_are_those_of_schulman_and_low_var_is_cut_after_the_ratio():
    new, base = tensor(-1, -2), tensor(-1.5, -1)
    k3 = [np.exp(-0.5) - 1 + 0.5, np.exp(1) - 1 - 1]
    for kind, expected in {"k1": [0.5, -1], "k2": [0.125, 0.5], "k3": k3, "low_var_kl": k3}.items():
        estimate = objectives.compute_approx_kl(new, base, kind)
        assert estimate.dtype is torch.float32
        assert torch.allclose(estimate, torch.tensor(expected, dtype=torch.float32))
    weighted = objectives.compute_approx_kl(new, base, "low_var_kl", importance_ratio=torch.tensor([2.0, 100.0]))
    assert weighted.tolist() == pytest.approx([2 * k3[0], 10.0])


def test_sequences_move_by_the_mean_over_their_trainable_tokens():
    new, old = [tensor(-1, -1, -1), tensor(-2)], [tensor(0, -1, 5), tensor(-2)]
    masks = [tensor(1, 1, 0), tensor(1)]
    assert close(objectives.compute_gspo_kl(new, old, new, masks), 0.5, 0.5, 0.5, 0)
    advantages = [tensor(-1, -1, 1), tensor(-1)]
    args = SimpleNamespace(opsm_delta=0.4)
    mask, share = objectives.compute_opsm_mask(args, new, old, advantages, masks)
    assert mask.tolist() == [0, 0, 1, 1]
    assert share == 1.0  # two of two tokens of the first sequence, none of the second


def test_returns_run_from_the_end_with_any_length():
    rewards = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 5)))
    expected = [[sum(0.9 ** (s - t) * row[s] for s in range(t, 5)) for t in range(5)] for row in rewards.tolist()]
    assert torch.allclose(objectives.chunked_discounted_returns(rewards, 0.9), torch.tensor(expected).double())
    advantages, returns = objectives.vanilla_gae(tensor(0, 0, 1)[None], tensor(0.5, 0.25, 0.5)[None], 0.5, 0.5)
    # deltas -0.375, 0, 0.5; A = -0.375 + 0.25 * 0.125, 0.25 * 0.5, 0.5
    assert close(advantages, -0.34375, 0.125, 0.5)
    assert close(returns, 0.15625, 0.375, 1)
    batch = objectives.get_advantages_and_returns_batch(
        [4], [3], [tensor(0.5, 0.25, 0.5)], [tensor(0, 0, 1)], 0.5, 0.5
    )
    assert torch.equal(batch[0][0], advantages[0])


def test_rewards_go_to_the_last_trainable_token_and_kl_to_each():
    kl, masks = [tensor(1, 2, 4)], [tensor(1, 1, 0)]
    returns = objectives.get_reinforce_plus_plus_returns([3.0], kl, masks, [3], [5], 0.1, 0.5)
    assert close(returns[0], -0.1 + 0.5 * 2.8, 2.8, 0)
    assert close(objectives.get_reinforce_plus_plus_baseline_advantages([3.0], kl, masks, 0.1)[0], 2.9, 2.8, 2.6)
    assert close(objectives.get_grpo_returns([3.0], kl)[0], 3, 3, 3)
    with pytest.raises(ValueError, match="sample 0 has no trainable token"):
        objectives.get_reinforce_plus_plus_returns([3.0], kl, [tensor(0, 0, 0)], [3], [5], 0.1, 0.5)


def test_log_probs_are_those_of_the_entries_that_were_kept():
    logits = tensor(1, 2, 4).log()[None].requires_grad_()
    log_probs, entropy = objectives.calculate_log_probs_and_entropy(logits, torch.tensor([1]), None, True)
    probabilities = tensor(1, 2, 4) / 7
    assert close(log_probs.detach().exp(), 2 / 7)
    assert close(entropy.detach(), -(probabilities * probabilities.log()).sum().item())
    keep = torch.tensor([[True, False, False]])  # the token's own entry counts in any case
    masked, nothing = objectives.calculate_log_probs_and_entropy(logits, torch.tensor([1]), log_prob_keep_mask=keep)
    masked.sum().backward()
    assert close(masked.detach().exp(), 2 / 3)
    assert close(logits.grad, -1 / 3, 1 / 3, 0)
    assert nothing is None
    empty, _ = objectives.calculate_log_probs_and_entropy(logits[:0], torch.tensor([], dtype=torch.int64))
    assert empty.shape == (0,)
    with pytest.raises(ValueError, match="spread over tensor-parallel ranks"):
        objectives.calculate_log_probs_and_entropy(logits, torch.tensor([1]), SimpleNamespace(size=lambda: 2))


def test_means_of_samples_are_summed_with_their_own_or_given_denominators():
    masks, values = [tensor(1, 1), tensor(1, 0, 1), tensor(0)], tensor(1, 3, 5, 100, 7, 9)
    lengths = ([4, 6, 2], [2, 3, 1])
    assert context_parallel.get_sum_of_sample_mean(*lengths, masks)(values) == 2 + 6
    assert context_parallel.get_sum_of_sample_mean(*lengths, masks, tensor(4, 4, 0))(values) == 4
    assert context_parallel.get_sum_of_sample_mean(*lengths, masks, calculate_per_token_loss=True)(values) == 16


def test_one_rank_has_the_whole_of_every_sequence():
    values = tensor(1, 2)
    assert context_parallel.all_gather_with_cp(values, 5, 2) is values
    assert context_parallel.slice_with_cp(values, 0) is values
    assert context_parallel.slice_log_prob_with_cp([1, 2], 5, 2) == [1, 2]
    size, chunks, logits, tokens = context_parallel.get_logits_and_tokens_offset_with_cp(10, 4)
    assert (size, chunks[0], logits[0], tokens[0]) == (10, (0, 10), (5, 9), (6, 10))
    with pytest.raises(ValueError, match="2 values of a response of 3 tokens"):
        context_parallel.slice_log_prob_with_cp([1, 2], 5, 3)


@pytest.mark.parametrize(("name", "weights"), [("vanilla_tis_function", [2, 1, 0.5]), ("icepop_function", [0, 1, 0])])
def test_corrections_bound_the_weight_or_drop_the_token(name, weights):
    trainer, engine = [tensor(4, 1).log(), tensor(0.25).log()], [tensor(1, 1).log(), tensor(1).log()]
    masks = [tensor(1, 1), tensor(1)]
    loss, same, metrics = getattr(corrections, name)(
        SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0),
        pg_loss=tensor(1, 2, 3),
        train_log_probs=trainer,
        rollout_log_probs=engine,
        loss_masks=masks,
        total_lengths=[3, 2],
        response_lengths=[2, 1],
    )
    assert close(loss, *(weight * value for weight, value in zip(weights, (1, 2, 3), strict=True)))
    assert same is masks
    assert close(metrics["tis"], 4, 1, 0.25)
    assert close(metrics["tis_abs"], 3, 0, 0.75)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1]


@pytest.fixture
def no_megatron(monkeypatch):
    """As in a process that has not imported Megatron."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)


REDUCER = """
from megatron.core import mpu
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert mpu.get_context_parallel_world_size() == 1 and mpu.is_pipeline_last_stage()
    assert (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()) == (0, 1)
    assert mpu.get_context_parallel_group() is None
    return get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks)
"""


def test_a_function_asks_megatron_for_its_ranks_where_no_megatron_trains(no_megatron, by, connect):
    config = by(REDUCER, custom_pg_loss_reducer_function_path=True)
    plugins, _ = connect(config)
    loss = plugins.loss("policy_loss")
    response = {"advantages": 0.5, "rollout_log_probs": 0.0, "slime_mask": 1.0, "slime_weight": 0.5}
    response |= {
        "loss_mask": 1.0,
        "sample": 0.0,
        "slime_sample": 0.0,
        "slime_total_length": 3.0,
        "slime_denominator": 1.0,
    }
    columns = {name: torch.full((2,), value) for name, value in response.items()}
    values, _ = loss.fn(torch.zeros(2), torch.zeros(2), columns, settle(config.train))
    assert (values * 0.5).sum() == -0.5  # the mean of -0.5 and -0.5


def test_only_the_ranks_of_megatron_are_served_and_only_without_it(no_megatron):
    finder = Finder.install()
    try:
        with pytest.raises(ModuleNotFoundError, match=r"megatron\.training is not served.*--train-backend megatron"):
            import megatron.training  # noqa: F401
        assert finder.find_spec("megatron.core.mpu") is not None
        assert Finder(megatron=True).find_spec("megatron.core.mpu") is None
    finally:
        finder.remove()
    assert "megatron" not in sys.modules


def test_engines_are_counted_and_periodic_actions_fall_due():
    assert get_rollout_num_engines(SimpleNamespace(rollout_num_engines=3)) == 3
    assert get_rollout_num_engines(SimpleNamespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4
    assert get_rollout_num_engines(SimpleNamespace(rollout_num_gpus=0)) == 1
    due = loading.should_run_periodic_action
    assert [step for step in range(7) if due(step, 3, num_rollout=7)] == [2, 5, 6]
    assert [step for step in range(6) if due(step, 100, num_rollout_per_epoch=2)] == [1, 3, 5]
    assert not due(0, None)
    assert loading.group_by("abca") == {"a": ["a", "a"], "b": ["b"], "c": ["c"]}
    for value in ("AQAAAAIAAAA=", b"\1\0\0\0\2\0\0\0", [1, 2], torch.tensor([[1], [2]])):
        decoded = loading.decode_int32_meta_array({"other": 1, "ids": value}, ("absent", "ids"))
        assert (decoded.tolist(), decoded.dtype) == ([1, 2], torch.int32)
    assert loading.decode_int32_meta_array({}, "ids") is None


def test_one_instance_of_each_class_and_another_after_clearing():
    class First(metaclass=loading.SingletonMeta):
        pass

    class Second(First):
        pass

    first = First()
    assert First() is first
    assert type(Second()) is Second
    First.clear_instances()
    assert First() is not first


def test_times_are_added_up_by_name():
    Timer.clear_instances()
    calls = []

    @with_defer(lambda: calls.append("after"))
    @timer
    def work():
        with inverse_timer("work"):
            calls.append("Timer().timers has it: " + str("work" in Timer().timers))

    work()
    with timer("block"):
        pass
    Timer().add("block", 2.0)
    Timer().add("block", 3.0)
    assert calls == ["Timer().timers has it: True", "after"]
    assert Timer().log_dict()["block"] >= 5.0
    with pytest.raises(RuntimeError, match="'block' has not been started"):
        Timer().end("block")
    Timer().reset("block")
    assert list(Timer().timers) == ["work"]
    Timer().reset()
    assert Timer().timers == {}


def test_pass_rates_statistics_and_repetition_are_hand_worked():
    rates = measures.compute_pass_rate([1, 0, 0, 0, 1, 1, 0, 0], group_size=4)
    assert rates == pytest.approx({"pass@1": 0.375, "pass@2": (0.5 + 5 / 6) / 2, "pass@4": 1.0})
    assert measures.compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(ValueError, match="5 rewards are not 1 groups of 4"):
        measures.compute_pass_rate([1] * 5, 4)
    assert measures.compute_statistics([1, 2, 6]) == {"mean": 3, "median": 2, "max": 6, "min": 1}
    assert measures.has_repetition("ab" * 6000)
    assert not measures.has_repetition("ab" * 4000)
    assert measures.compression_ratio("") == (float("inf"), 0.0)
    for algorithm in measures.COMPRESSORS:
        ratio, saved = measures.compression_ratio("a" * 1000, algorithm=algorithm)
        assert ratio > 5
        assert saved == pytest.approx(100 * (1 - 1 / ratio))
    with pytest.raises(ValueError, match="none of zlib"):
        measures.compression_ratio("a", algorithm="zip")


def test_figures_of_a_rollout_are_logged_in_the_runs_folder(tmp_path):
    args = SimpleNamespace(save=str(tmp_path), advantage_estimator="grpo", reward_key="", rollout_num_gpus=2)
    args.log_reward_category, args.log_passrate, args.n_samples_per_eval_prompt = None, True, 2
    samples = [Sample(group_index=n // 2, response_length=2 + n, reward=float(n == 3)) for n in range(4)]
    samples[3].status, samples[3].non_generation_time = Sample.Status.TRUNCATED, 1.0
    samples[0].loss_mask = [1, 0]
    samples[0].prefix_cache_info.add({"cached_tokens": 3, "prompt_tokens": 12})
    rollout_measures.log_rollout_data(7, args, samples, {"extra": torch.tensor(2.0)}, 4.0)
    evaluation = {"set": {"rewards": [1, 0], "truncated": [True, False], "samples": samples}}
    figures = rollout_measures.log_eval_rollout_data(7, args, evaluation)
    log(SimpleNamespace(save=None), {"rollout/step": 1}, "rollout/step")
    rollout, eval_row = [json.loads(line) for line in (tmp_path / "log" / "functions.jsonl").read_text().splitlines()]
    assert (rollout["rollout/step"], rollout["extra"], rollout["rollout/zero_std/count_0.0"]) == (7, 2.0, 1)
    assert (rollout["rollout/response_len/mean"], rollout["rollout/truncated_ratio"]) == (3.25, 0.25)
    assert (rollout["rollout/prefix_cache_hit_rate"], rollout["perf/tokens_per_gpu_per_sec"]) == (0.25, 14 / 4 / 2)
    assert rollout["perf/longest_sample_tokens_per_sec_without_non_generation"] == 5 / 3
    assert eval_row == figures
    assert (figures["eval/set"], figures["eval/set-pass@1"], figures["eval/set-truncated_ratio"]) == (0.5, 0.5, 0.5)


def test_spans_nest_and_say_how_they_ended():
    sample, other = Sample(index=3, group_index=1), Sample()

    @trace_function("whole", target="sample", attrs_getter=lambda args, sample: {"n": 2})
    async def generate(args, sample):
        with trace_span([sample, other], "turn") as span:
            trace_event(sample, "token")
            span.update(build_sglang_meta_trace_attrs({"cached_tokens": 3, "finish_reason": {"type": "stop"}, "x": 1}))
        with pytest.raises(KeyError), trace_span(sample, "tool"):
            raise KeyError("no tool")
        return sample

    assert asyncio.run(generate(None, sample)) is sample
    events = sample.trace["events"]
    whole, turn, token, turn_end, tool, tool_end, end = events
    assert [event["name"] for event in events] == ["whole", "turn", "token", "turn", "tool", "tool", "whole"]
    assert (whole["attrs"], whole["sample_id"], whole["group_id"]) == ({"n": 2}, 3, 1)
    assert turn["parent_span_id"] == tool["parent_span_id"] == whole["span_id"] == end["span_id"]
    assert (token["type"], token["parent_span_id"]) == ("event", turn["span_id"])
    assert turn_end["attrs"] == {"cached_tokens": 3, "finish_reason": "stop"}
    assert tool_end["attrs"]["error_type"] == "KeyError"
    assert [event["type"] for event in other.trace["events"]] == ["span_start", "span_end"]
    assert trace_function("first")(lambda args, one: len(one.trace["events"]))(None, sample) == 8
    with trace_span("no sample", "nothing"):
        pass


def test_rollout_data_become_tensors_on_the_cpu():
    tokens = np.array([1, 2])
    tokens.flags.writeable = False
    media = {"pixels": torch.ones(1, requires_grad=True), "note": "kept"}
    data = {"tokens": [tokens], "loss_masks": [[1, 0]], "multimodal_train_inputs": [media, None], "other": [1]}
    rollout_checks.tensorize_rollout_data_for_training(data | {"rollout_mask_sums": [2]})
    rollout_checks.tensorize_rollout_data_for_training(data)
    assert (data["tokens"][0].dtype, data["loss_masks"][0].dtype) == (torch.long, torch.int)
    pictures, nothing = data["multimodal_train_inputs"]
    assert (pictures["note"], pictures["pixels"].requires_grad, nothing) == ("kept", False, None)
    assert data["other"] == [1]


def test_routed_experts_are_checked_layer_by_layer():
    args = SimpleNamespace(num_layers=3, moe_router_topk=2, moe_layer_freq=[0, 1, 1])
    routes = torch.zeros(4, 3, 2, dtype=torch.uint8)
    routes[:, 1:, 1] = 7
    rollout_checks.validate_rollout_routed_experts_for_replay([routes], args)
    routes[:, 2] = 0
    for wrong, problem in (
        ([routes], r"all zero in layers \[2\]"),
        ([routes[:, :2]], r"\(4, 2, 2\), not"),
        ([], "no sample"),
    ):
        with pytest.raises(ValueError, match=problem):
            rollout_checks.validate_rollout_routed_experts_for_replay(wrong, args)


def test_siblings_of_a_rollout_share_its_id():
    one, other = Sample(rollout_id=1), Sample(rollout_id=2)
    for node in ([[one, other]], [[[one, one]], [[other]]], one):
        rollout_checks.validate_rollout_id_annotated(node)
    for siblings in ([one, other], [one, Sample()]):
        with pytest.raises(ValueError, match="give all of them the same"):
            rollout_checks.validate_rollout_id_annotated([[siblings]])
