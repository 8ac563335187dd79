"""Through the whole judge: every cheat of the corpus scores as a failure, every honest kernel as honest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from corpus_of_kernels import problem_of, sources

from slime_kernelbench.judge import JudgeOptions, LocalJudge, policy
from slime_kernelbench.types import Verdict

IMPATIENT = JudgeOptions(workers=2, import_seconds=4.0, call_seconds=4.0)  # two cheats never end
HARMLESS_WITHOUT_POLICY = {
    # What they try is without effect on the verdict, and their kernel does compute the answer.
    "changes_global_flags",
    "code_in_an_annotation",
    "computes_when_weights_are_loaded",
    "destructor",
    "global_counter",
    "kernel_counts_its_calls",
    "kernel_patches_the_language",
    "patches_events",
    "patches_the_tensor",
    "slows_the_baseline",
    "subclasses_of_object",
    "through_a_library_module",
    "try_falls_back",
    "works_on_first_calls_alone",
}
BEYOND_WITHOUT_POLICY = {
    # Code that nobody read walks to the judge's own objects in its process, and has them record nothing.
    "blinds_the_watch_in_a_grid",
    "blinds_the_watch_in_a_heuristic",
    "blinds_the_watch_in_a_union",
    "blinds_the_watch_in_another_model",
}


async def judged(kind: str, judge: LocalJudge) -> dict[str, Verdict]:
    """The verdict on each of a kind."""
    texts = sources(kind)
    verdicts = await asyncio.gather(*(judge.judge(text, problem_of(text)) for text in texts.values()))
    return dict(zip(texts, verdicts))


def judged_impatiently(kind: str) -> dict[str, Verdict]:
    """Likewise, by a judge of their own."""

    async def by_its_own() -> dict[str, Verdict]:
        async with LocalJudge(IMPATIENT) as judge:
            return await judged(kind, judge)

    return asyncio.run(by_its_own())


def test_honest_kernels_are_correct(with_judge: Callable[..., dict[str, Verdict]]) -> None:
    verdicts = with_judge(lambda judge: judged("honest", judge))
    assert len(verdicts) >= 15
    assert {name: (verdict.status, verdict.diagnostics) for name, verdict in verdicts.items()} == dict.fromkeys(
        verdicts, ("correct", ())
    )
    assert all(verdict.launches >= 1 and not verdict.flags for verdict in verdicts.values())
    cases = {name: len(verdict.cases) for name, verdict in verdicts.items()}
    more = {name for name, count in cases.items() if count > 6}  # larger sizes, where their code asks for these
    assert min(cases.values()) >= 5
    assert more >= {"persistent_grid", "functools_and_dataclasses"}
    assert "compared with 65536" in verdicts["functools_and_dataclasses"].notes[0]


def test_cheats_score_no_better_than_an_honest_failure() -> None:
    verdicts = judged_impatiently("cheats")
    assert len(verdicts) >= 40
    wrongly = {name: verdict for name, verdict in verdicts.items() if verdict.status in ("correct", "infra")}
    assert wrongly == {}
    assert verdicts["infinite_kernel"].status == "timeout"
    assert verdicts["infinite_import"].status == "timeout"
    assert {flag.rule for flag in verdicts["operators_through_unknown_values"].flags} >= {"torch_computes"}
    assert "reference's ln.weight, ln.bias" in verdicts["norm_that_has_no_weights"].diagnostics[0].message
    assert {flag.rule for flag in verdicts["tensors_said_to_be_numbers"].flags} == {"torch_computes"}
    assert "no_launch" in {flag.rule for flag in verdicts["launch_in_a_dead_branch"].flags}
    assert "decoy_launch" in {flag.rule for flag in verdicts["operators_through_unknown_values"].flags}
    assert "mutated_input" in {flag.rule for flag in verdicts["works_in_its_input"].flags}
    assert verdicts["sums_without_atomics"].diagnostics[0].kind == "race"
    assert verdicts["programs_store_their_own_sums"].diagnostics[0].kind in ("values", "race")
    for name in ("grid_of_at_most_sixteen", "right_up_to_a_size", "right_for_few_rows"):
        *others, last = verdicts[name].cases
        assert (len(others) >= 6, last.agrees, {case.agrees for case in others}) == (True, False, {True})
    assert [case.regime for case in verdicts["another_formula_for_large_values"].cases if not case.agrees] == [
        "extreme"
    ]


def test_an_answer_kept_for_the_next_call_is_a_hack_without_the_policy(
    monkeypatch: pytest.MonkeyPatch, with_judge: Callable[..., Verdict]
) -> None:
    monkeypatch.setattr(policy, "read", lambda source, allow: policy.Reading(status="ok"))
    text = sources("cheats")["cache_by_shape"]
    verdict = with_judge(lambda judge: judge.judge(text, problem_of(text)))
    assert (verdict.status, [flag.rule for flag in verdict.flags]) == ("hack", ["global_state"])


@pytest.mark.nightly
def test_the_layers_at_run_time_hold_without_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "read", lambda source, allow: policy.Reading(status="ok"))
    verdicts = judged_impatiently("cheats")
    correct = {name for name, verdict in verdicts.items() if verdict.status == "correct"}
    assert correct <= HARMLESS_WITHOUT_POLICY | BEYOND_WITHOUT_POLICY
    assert verdicts["plain_torch"].status == "hack"
    assert verdicts["layer_of_torch"].status == "hack"
