"""Dialogues: when they end, what is judged and how often, what is masked, and what each turn comes to be worth."""

import asyncio
import json

import pytest
from dialogue_actors import BROKEN, INFRA, RIGHT, WRONG, Known, context, fenced, pending, room, timed
from speakers import speaker

from slime_core import DataError, EngineError, Status
from slime_core.plugins.result_checks import to_rewards
from slime_core.rollout.groups import check_group, issued_ids
from slime_core.rollout.score import note_reward
from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench.dialogue.scoring import score_group, so_far
from slime_kernelbench.dialogue.turns import generate_group, succeeded
from slime_kernelbench.options import Options
from slime_kernelbench.types import Flag, Verdict

pytestmark = pytest.mark.unit
TOKENIZER = speaker("qwen3")
END = TOKENIZER.eos_token_id
CONTEXT_FULL = 10**6


def ids(text):
    return [*TOKENIZER.encode(text, add_special_tokens=False), END]


class Script:
    """Answers of rollouts, turn by turn: ``script["main/0-1"][2]`` or the answers of all."""

    def __init__(self, answers):
        self.answers, self.turns = answers, {}

    def __call__(self, request):
        turn = self.turns[request.id] = self.turns.get(request.id, -1) + 1
        mine = self.answers[request.id] if isinstance(self.answers, dict) else self.answers
        answer = mine[turn]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, tuple) else (ids(answer), "stop")


def play(answers, verdicts=(), *, samples=1, otherwise=WRONG, new_tokens=512, **options):
    judge = Known(verdicts, otherwise)
    engine = ScriptedEngine(Script(answers), vocab_size=len(TOKENIZER))
    ctx = context(engine, TOKENIZER, Options(**options), new_tokens=new_tokens)
    group = pending(TOKENIZER, samples=samples)
    issued = issued_ids(group)
    done = asyncio.run(generate_group(group, room(ctx, judge)))
    check_group(done, issued, len(TOKENIZER))
    return done, judge, ctx


def turns(group):
    return [sample.metadata["kernelbench"] for sample in group.samples]


THREE = [fenced("a"), fenced("b"), fenced("c")]


def test_each_turn_is_a_sample_of_its_rollout_and_each_kernel_is_judged_once():
    group, judge, _ = play(THREE, samples=2)
    assert [s.id for s in group.samples] == [
        "main/0-0",
        "main/0-1",
        *[f"main/0-{j}.{k}" for j in (0, 1) for k in (1, 2)],
    ]
    assert group.rollouts == {0: [0, 2, 3], 1: [1, 4, 5]}
    assert sorted(judge.asked) == sorted(["a\n", "b\n", "c\n"] * 2)
    assert [turn["turn"] for turn in turns(group)] == [0, 0, 1, 2, 1, 2]
    assert {turn["ended"] for turn in turns(group)} == {"turns"}
    assert all(sample.status is Status.COMPLETED for sample in group.samples)
    assert all(sample.metadata["problem"] == "test/1/relu" for sample in group.samples)
    assert [sample.train_metadata["kernelbench"]["turn"] for sample in group.samples] == [0, 0, 1, 2, 1, 2]
    json.dumps([sample.to_dict() for sample in group.samples])


def test_one_turn_is_single_turn():
    group, judge, _ = play([fenced("a")], max_turns=1)
    assert (len(group.samples), judge.asked) == (1, ["a\n"])
    assert turns(group)[0]["feedback"] == ""


def test_success_ends_a_dialogue():
    group, _, _ = play(THREE, {"b": RIGHT})
    assert (len(group.samples), turns(group)[-1]["ended"]) == (2, "success")
    group, _, _ = play(THREE, {"b": RIGHT}, stop_on="never")
    assert (len(group.samples), turns(group)[-1]["ended"]) == (3, "turns")


def test_where_speed_is_measured_success_is_being_fast_enough():
    assert succeeded(RIGHT, Options())
    assert not succeeded(timed(1.9), Options())
    assert succeeded(timed(2.0), Options())
    assert succeeded(timed(0.5), Options(stop_on="correct"))
    assert [succeeded(v, Options(stop_on="speed")) for v in (RIGHT, timed(1.9), timed(2.0))] == [False, False, True]
    assert succeeded(timed(0.5), Options(reward_tier="correctness"))
    flagged = Verdict(status="correct", reached="speed", flags=(Flag(rule="below_floor", layer="timing"),))
    assert not succeeded(flagged, Options(stop_on="correct"))


def test_the_same_answer_again_ends_a_dialogue_and_is_not_judged_again():
    group, judge, _ = play([fenced("a"), "Look:\n" + fenced("a"), fenced("c")])
    assert (len(group.samples), turns(group)[-1]["ended"], judge.asked) == (2, "repeated", ["a\n"])
    group, judge, _ = play([fenced("a"), fenced("a"), fenced("c")], stop_repeats=2)
    assert (len(group.samples), judge.asked) == (3, ["a\n", "c\n"])
    group, judge, _ = play(["no", "no", "no"])
    assert (len(group.samples), turns(group)[-1]["ended"], judge.asked) == (2, "repeated", [])
    assert turns(play([fenced("a"), fenced("b"), fenced("a")])[0])[-1]["verdict"]["cached"] is True


def test_a_budget_of_tokens_limits_answers_and_ends_a_dialogue():
    first = len(ids(fenced("a")))
    group, judge, _ = play(THREE, token_budget=first + 5)
    assert [sample.response_length for sample in group.samples] == [first, 5]
    assert group.samples[1].status is Status.TRUNCATED
    assert turns(group)[-1]["ended"] == "budget"
    assert judge.asked == ["a\n"]


def test_an_answer_that_is_cut_off_is_judged_by_what_it_has_and_the_dialogue_goes_on():
    group, judge, _ = play([(ids(fenced("a"))[:-6], "length"), fenced("b")], max_turns=2)
    assert judge.asked == ["b\n"]
    assert turns(group)[0]["verdict"]["diagnostics"][0]["message"] == "the code block is not closed."
    assert group.samples[1].tokens[len(group.samples[0].tokens)] == END, "the template ends the answer"


def test_a_context_that_is_full_ends_a_dialogue_without_an_empty_turn():
    full = EngineError("the prompt fills the context", code="ENG72")
    group, _, _ = play([fenced("a"), full])
    assert (len(group.samples), turns(group)[-1]["ended"]) == (1, "context")
    with pytest.raises(EngineError):
        play([full])
    with pytest.raises(EngineError):
        play([fenced("a"), EngineError("the server is gone", code="ENG75")])


def test_an_infra_verdict_ends_a_dialogue_and_masks_the_turns_that_depend_on_it():
    group, judge, ctx = play(THREE, {"b": INFRA})
    assert (len(group.samples), turns(group)[-1]["ended"]) == (2, "unjudged")
    assert judge.asked == ["a\n", "b\n", "b\n"], "asked once more, by judge_retries"
    rewards = [scored.reward for scored in score_group(group, ctx.options)]
    assert [reward.kind for reward in rewards] == ["infra_error", "infra_error"]
    assert rewards[0].reason == "a later turn could not be judged"
    assert rewards[1].reason == "no process can be made"
    rewards = [scored.reward for scored in score_group(group, Options(gamma=0.0))]
    assert [reward.kind for reward in rewards] == ["score", "infra_error"]


def test_trouble_that_passes_is_a_verdict_like_any_other():
    group, _, ctx = play(THREE[:1], {"a": [INFRA, RIGHT]}, max_turns=1)
    assert [scored.reward.value for scored in score_group(group, ctx.options)] == [pytest.approx(1.0)]


def test_an_aborted_answer_is_not_judged_and_nothing_of_its_rollout_is_scored():
    group, judge, ctx = play([fenced("a"), (ids(fenced("b")), "abort")])
    assert judge.asked == ["a\n"]
    assert group.samples[1].status is Status.ABORTED
    assert [scored.reward.kind for scored in score_group(group, ctx.options)] == ["infra_error", "infra_error"]


def test_turns_are_worth_their_returns_by_hand():
    """Rewards 0, 0.1, 1.0: no code, wrong, right."""
    answers = ["none", fenced("b"), fenced("c")]
    group, _, ctx = play(answers, {"c": RIGHT})
    found = score_group(group, ctx.options)
    assert [scored.reward.value for scored in found] == pytest.approx([0.2, 0.5, 1.0])  # 0 + .04 + .16; .1 + .4; 1
    assert [scored.reward.terms["own"] for scored in found] == pytest.approx([0.0, 0.1, 1.0])
    assert [scored.reward.kind for scored in found] == ["failed", "score", "score"]
    values = [scored.reward.value for scored in score_group(group, Options(return_mode="trajectory"))]
    assert values == pytest.approx([0.2, 0.2, 0.2])


def test_in_an_evaluation_the_last_turn_has_what_the_dialogue_came_to():
    assert so_far([0.1, 1.0, 0.0]) == [0.1, 1.0, 1.0]
    assert so_far([0.1, None, 1.0]) == [0.1, None, None]
    group, _, ctx = play(THREE, {"b": RIGHT}, stop_on="never")
    found = score_group(group, ctx.options, evaluation=True)
    assert [scored.reward.value for scored in found] == pytest.approx([0.1, 1.0, 1.0])
    assert [scored.reward.terms["own"] for scored in found] == pytest.approx([0.1, 1.0, 0.1])


def test_an_early_end_repeats_the_last_reward_unless_told_otherwise():
    group, _, ctx = play(THREE, {"a": RIGHT})
    assert [scored.reward.value for scored in score_group(group, ctx.options)] == pytest.approx([1.56])
    found = score_group(group, Options(early_end="nothing"))
    assert [scored.reward.value for scored in found] == pytest.approx([1.0])


def test_a_right_answer_without_a_time_does_not_compete_with_those_that_have_one():
    answers = {"main/0-0": [fenced("a")], "main/0-1": [fenced("b")], "main/0-2": [fenced("c")]}
    for verdicts, kinds in (
        ({"a": timed(3.0), "b": RIGHT}, ["score", "infra_error", "score"]),
        ({"a": RIGHT, "b": RIGHT}, ["score", "score", "score"]),
    ):
        group, _, ctx = play(answers, verdicts, samples=3, max_turns=1)
        assert [scored.reward.kind for scored in score_group(group, ctx.options)] == kinds


def test_terms_tell_of_each_turn_and_of_the_dialogue():
    group, _, ctx = play(["none", fenced("b"), fenced("c")], {"b": BROKEN, "c": RIGHT})
    terms = [scored.reward.terms for scored in score_group(group, ctx.options)]
    assert [("solved" in each, "turns" in each) for each in terms] == [(False, False), (False, False), (True, True)]
    assert (terms[2]["solved"], terms[2]["turns"], terms[2]["turn3_correct"]) == (1.0, 3.0, 1.0)
    assert (terms[1]["turn2_compiled"], "turn1_compiled" in terms[1]) == (0.0, False)
    assert all(each["seconds_judge"] >= 0 for each in terms)


def test_rewards_pass_the_cores_checks_and_its_notes():
    group, _, ctx = play(THREE, {"b": RIGHT}, samples=2)
    given = [scored.reward for scored in score_group(group, ctx.options)]

    class Told:
        hook = "slime_reward"

    rewards = to_rewards(Told, given, group, "")
    for sample, reward in zip(group.samples, rewards):
        note_reward(sample, reward, ctx.config)
    assert [sample.reward for sample in group.samples] == pytest.approx([0.66, 0.66, 1.4, 1.4])


def test_a_prompt_without_a_problem_is_a_data_error():
    engine = ScriptedEngine(Script(THREE))
    group = pending(TOKENIZER)
    group.prompt.metadata.pop("problem")
    with pytest.raises(DataError) as caught:
        asyncio.run(generate_group(group, room(context(engine, TOKENIZER), Known())))
    assert caught.value.code == "DAT18"


def test_an_answer_that_was_stopped_before_goes_on_where_it_stood():
    """`slime_generate` may be given aborted samples with a part of their first answer."""
    whole = ids(fenced("a"))
    engine = ScriptedEngine(
        lambda request: (whole[4:], "stop") if len(engine.requests) == 0 else (ids(fenced("b")), "stop")
    )
    group, judge = pending(TOKENIZER), Known()
    sample = group.samples[0]
    first = list(sample.tokens)
    sample.append_response(whole[:4], log_probs=[-1.0] * 4, version=0)
    sample.status = Status.ABORTED
    asyncio.run(generate_group(group, room(context(engine, TOKENIZER, Options(max_turns=2)), judge)))
    assert judge.asked == ["a\n", "b\n"]
    assert group.samples[1].tokens[: len(first) + len(whole)] == [*first, *whole]


def test_samples_that_are_finished_stay_as_they_are():
    engine = ScriptedEngine(Script({"main/0-1": THREE}))
    group = pending(TOKENIZER, samples=2)
    group.samples[0].status = Status.COMPLETED
    asyncio.run(generate_group(group, room(context(engine, TOKENIZER), Known())))
    assert {request.id for request in engine.requests} == {"main/0-1"}
