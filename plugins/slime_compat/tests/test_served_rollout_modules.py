"""`slime.rollout`'s graders, filters, data sources and sample hooks, against hand-worked values."""

import asyncio
import importlib
from types import SimpleNamespace

import pytest

from slime_compat.finder import Finder
from slime_core.compat.sample import Sample

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def finder():
    finder = Finder.install()
    yield finder
    finder.remove()


def served(name):
    return importlib.import_module(f"slime.rollout.{name}")


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"first \boxed{7}, no: \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}", True),
        (r"\boxed{\frac{1}{3}}", "0.5", False),
        ("0.5", "0.5", False),
        (r"\boxed{7}", "", False),
    ],
    ids=["the last box", "equal in value", "another value", "no box", "no label"],
)
def test_a_boxed_answer_is_right_where_it_equals_the_label(response, label, right):
    assert served("rm_hub.math_utils").grade_answer_verl(response, label) is right
    assert served("rm_hub.deepscaler").get_deepscaler_rule_based_reward(f"hm</think>{response}", label) == int(right)
    assert served("rm_hub.deepscaler").get_deepscaler_rule_based_reward(response, label) == 0  # its thought has no end


def test_boxes_are_found_with_their_nested_braces():
    for name in ("math_utils", "math_dapo_utils"):
        module = served(f"rm_hub.{name}")
        assert module.last_boxed_only_string(r"\boxed{1} \boxed{\frac{1}{2\}}} .") == r"\boxed{\frac{1}{2\}}}"
        assert module.last_boxed_only_string(r"\boxed{open") is None
        assert module.remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert served("rm_hub.math_utils").last_boxed_only_string(r"\fbox{7}") == r"\fbox{7}"
    assert served("rm_hub.math_utils").remove_boxed("7") is None
    answers = [
        served("rm_hub.math_utils").extract_answer(text) for text in (r"\boxed{7}", r"\fbox{7}", r"\boxed 7 {8}")
    ]
    assert answers == ["7", None, None]
    with pytest.raises(AssertionError, match="box error: 7"):
        served("rm_hub.math_dapo_utils").remove_boxed("7")


@pytest.mark.parametrize(
    ("response", "strict", "score"),
    [
        ("Answer: 41\nAnswer: 1,042 dollars", False, {"score": 1.0, "acc": True, "pred": "1042"}),
        ("it is 1042", False, {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
        (r"it is \boxed{1042}", True, {"score": 1.0, "acc": True, "pred": "1042"}),
        (r"\boxed{1042}" + " " * 100, True, {"score": -1.0, "acc": False, "pred": None}),
        ("Answer: 1042\n" + " " * 300, False, {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ],
    ids=["the last answer", "no answer", "a box", "a box before the last 100", "an answer before the last 300"],
)
def test_dapo_scores_an_answer_or_strictly_a_box(response, strict, score):
    assert served("rm_hub.math_dapo_utils").compute_score(response, "1042", strict) == score


def test_words_choices_and_instructions_are_scored_as_by_their_benchmarks():
    f1 = served("rm_hub.f1").f1_score
    assert f1("the cat sat", "A cat sat down.") == pytest.approx((0.8, 1.0, 2 / 3))
    assert f1("yes", "no") == f1(None, "no") == (0.0, 0.0, 0.0)
    gpqa = served("rm_hub.gpqa").compute_gpqa_reward
    texts = {"choices": ["London", "Paris", "Berlin"]}
    assert [gpqa("A</think>The answer is B.", label, texts) for label in ("B", 1, "paris", "C")] == [
        1.0,
        1.0,
        1.0,
        0.0,
    ]
    assert gpqa("It is certainly Paris!", "Paris", texts) == 1.0
    assert gpqa(None, "B") == 0.0
    ifbench = served("rm_hub.ifbench").compute_ifbench_reward
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": {}}
    assert [ifbench(text, None, row) for text in ("no commas", "one, comma")] == [1.0, 0.0]
    assert ifbench("anything", None, {}) == ifbench("anything", None) == 0.0


def test_a_group_of_equal_rewards_is_dropped_unless_the_step_would_fall_short():
    hub, args = served("filter_hub.base_types"), SimpleNamespace(reward_key=None)
    filters = served("filter_hub.dynamic_sampling_filters")
    equal, differing = ([Sample(reward=reward) for reward in rewards] for rewards in ((1, 1), (0, 1)))
    drops = hub.MetricGatherer()
    for name, remaining, dropped in [
        ("check_reward_nonzero_std", 4, True),
        ("check_reward_nonzero_std_with_fallback", 5, True),
        ("check_reward_nonzero_std_with_fallback", 4, False),
    ]:
        output = hub.call_dynamic_filter(getattr(filters, name), args, equal)
        sizes = {"remaining_batch_size": remaining, "target_data_size": 4}
        assert hub.should_drop_dynamic_filter_output(output, **sizes) is dropped
        drops.on_dynamic_filter_drop(output.reason)
    assert filters.check_reward_nonzero_std(args, differing).keep
    drops.on_dynamic_filter_drop(None)
    assert drops.collect() == {"rollout/dynamic_filter/drop_zero_std_1.0": 3}


def test_a_buffered_source_hands_out_what_was_put_in_and_then_new_groups():
    module = served("data_source")
    args = SimpleNamespace(
        rollout_global_dataset=False, prompt_data=None, buffer_filter_path=None, n_samples_per_prompt=2
    )
    source = module.RolloutDataSourceWithBuffer(args)
    assert isinstance(source, module.DataSource)
    first = source.get_samples(2)
    assert [[(s.group_index, s.index) for s in group] for group in first] == [[(0, 0), (0, 1)], [(1, 2), (1, 3)]]
    source.add_samples(first)
    assert source.get_buffer_length() == 2
    assert source.get_samples(1) == first[:1]
    again, new = source.get_samples(2)
    assert again is first[1]
    assert [s.index for s in new] == [4, 5]
    with pytest.raises(ValueError, match="a group is a list of 2 samples, not 1 samples"):
        source.add_samples([[Sample()]])
    with pytest.raises(RuntimeError, match="RolloutDataSource is read-only"):
        module.RolloutDataSource(args).add_samples(first)
    buffer = [["a"], ["b"], ["c"]]
    assert module.pop_first(args, None, buffer, 2) == [["a"], ["b"]]
    assert module.pop_first(args, None, buffer, 2) == [["c"]]
    assert buffer == []


def test_sample_hooks_are_called_on_every_sample_and_may_replace_it(write):
    source = """
def note(args, sample, *, rollout_id=None):
    sample.metadata["rollout"] = rollout_id
async def replace(args, sample, **kwargs):
    return type(sample)(index=sample.index + 10, metadata=sample.metadata)
def wrong(args, sample):
    return 1
"""
    path, module = write(source), served("sample_hooks")
    args = SimpleNamespace(rollout_sample_hook_path=[f"{path}:note", f"{path}:replace"])
    nested = [[Sample(index=0), Sample(index=1)], Sample(index=2)]
    (one, two), three = asyncio.run(module.apply_rollout_sample_hooks(args, nested, rollout_id=7))
    assert [s.index for s in (one, two, three)] == [10, 11, 12]
    assert {s.metadata["rollout"] for s in (one, two, three)} == {7}
    args.rollout_sample_hook_path = [f"{path}:wrong"]
    with pytest.raises(TypeError, match=r"wrong' returned a int, not a sample or None"):
        asyncio.run(module.apply_rollout_sample_hooks(args, Sample()))
