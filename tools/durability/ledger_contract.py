"""What every Ledger must do, as checks that run against any implementation, as `slime_core.testing.contracts` are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from slime_core.errors import SlimeError
from slime_core.protocols import GroupRecord, Ledger, RequestTurn
from slime_core.testing.contracts import sample_group
from slime_core.types import Completion, Drop, GenerateRequest, Group, SamplingParams

LedgerCheck = Callable[[Ledger], Awaitable[None]]


async def ledger_keeps_every_sample_in_one_state(ledger: Ledger) -> None:
    """issued = trained + dropped + pending at every moment, and repeating a call doubles nothing."""
    groups = [sample_group(0), sample_group(1, fan_out=True), sample_group(2)]
    for group in groups:
        issued = Group(prompt=group.prompt, samples=group.samples[:2], rollouts=dict(list(group.rollouts.items())[:2]))
        for _ in range(2):
            await ledger.issue([issued])
    assert await _balance(ledger) == (6, 0, 0, 6)
    await ledger.finish(groups[0])
    await ledger.finish(groups[1])
    await ledger.finish(groups[1])
    assert await _balance(ledger) == (7, 0, 0, 7), "a fan-out sibling counts once"
    await ledger.drop([(groups[2].samples, Drop(reason="zero_std"))])
    counts = await ledger.counts()
    assert counts["dropped/zero_std"] == 2, counts
    assert await _balance(ledger) == (7, 0, 2, 5)


async def ledger_journals_a_step_before_it_trains(ledger: Ledger) -> None:
    """The composition is readable before the step ends, in order, and unfinished samples cannot enter it."""
    from slime_core.trainers.batch import make_batch

    group, other = sample_group(0, fan_out=True), sample_group(1)
    await ledger.issue([group, other])
    await ledger.finish(group)
    try:
        await ledger.journal(make_batch(4, "main", [other]))
    except SlimeError:
        pass
    else:
        raise AssertionError("a step with unfinished samples was journaled")
    await ledger.journal(make_batch(4, "main", [group]))
    assert await ledger.composition(5) == [s.id for s in group.samples]
    assert await ledger.composition(6) == []
    await ledger.trained(5)
    assert await _balance(ledger) == (5, 3, 0, 2)


async def ledger_reads_back_what_was_finished(ledger: Ledger) -> None:
    """Tokens, log-probs, masks, versions, text and references return as they were, in the order asked."""
    group = sample_group(3, fan_out=True)
    await ledger.issue([group])
    await ledger.finish(group)
    ids = [s.id for s in reversed(group.samples)]
    for got, want in zip(await ledger.samples(ids), reversed(group.samples), strict=True):
        assert got.to_dict() == want.to_dict(), (got, want)


async def ledger_recalls_what_it_knows_of_a_group(ledger: Ledger) -> None:
    """Pending, finished, trained or dropped, with samples in the group's order, reasons, and the newest tokens."""
    pending, done, gone = sample_group(0), sample_group(1, fan_out=True), sample_group(2)
    part = sample_group(3)
    done.samples.reverse()
    await ledger.issue([_issued(group) for group in (pending, done, gone, part)])
    await ledger.finish(done)
    gone.samples[1].weight_versions = [0, 7, 7]
    await ledger.drop([(gone.samples[:1], Drop(reason="empty")), (gone.samples[1:], Drop(reason="equal_rewards"))])
    rest = Group(prompt=part.prompt, samples=part.samples[1:], rollouts={7: [0]})
    await ledger.finish(rest, [(part.samples[:1], Drop(reason="infra_error"))])
    known = await ledger.groups(["main/0", "main/1", "main/2", "main/3", "main/99"])
    assert list(known) == ["main/0", "main/1", "main/2", "main/3"], list(known)
    assert [r.state for r in known.values()] == ["pending", "finished", "dropped", "finished"], known
    assert known["main/0"] == GroupRecord(state="pending"), known["main/0"]
    got = [sample.to_dict() for sample in known["main/1"].samples]
    assert got == [sample.to_dict() for sample in done.samples], "samples are not as they were, in the group's order"
    assert (known["main/1"].newest, known["main/1"].ticks) == (0, dict.fromkeys((s.id for s in done.samples), 2))
    dropped = known["main/2"]
    assert (dropped.drops, dropped.last_reason) == ({"empty": 1, "equal_rewards": 1}, "equal_rewards"), dropped
    assert (dropped.newest, dropped.ticks) == (7, {"main/2-1": 2}), dropped
    assert [s.id for s in known["main/3"].samples] == ["main/3-1"], known["main/3"]
    assert (known["main/3"].drops, known["main/3"].last_reason) == ({"infra_error": 1}, "infra_error")


async def ledger_goes_back_to_an_earlier_version(ledger: Ledger) -> None:
    """Later samples are finished again, their journals stay, and a version is made again with the same weights."""
    from slime_core.trainers.batch import make_batch

    groups = [sample_group(position) for position in range(3)]
    await ledger.issue(groups)
    for version, group in enumerate(groups):
        await ledger.finish(group)
        await ledger.journal(make_batch(version, "main", [group]))
        await ledger.trained(version + 1, f"f{version + 1}")
    for _ in range(2):
        await ledger.rewind(1)
        assert await _balance(ledger) == (6, 2, 0, 4)
    known = await ledger.groups([group.id for group in groups])
    assert [(r.state, r.version) for r in known.values()] == [("trained", 1), ("finished", 0), ("finished", 0)], known
    assert await ledger.composition(2) == [s.id for s in groups[1].samples]
    await _refused(ledger.journal(make_batch(1, "main", [groups[2]])), "a version has another composition")
    await _refused(ledger.journal(make_batch(7, "main", [groups[2]])), "samples entered a second step")
    await ledger.journal(make_batch(1, "main", [groups[1]]))
    await _refused(ledger.trained(2, "other"), "a version was made again with other weights")
    await ledger.trained(2, "f2")
    assert await _balance(ledger) == (6, 4, 0, 2)


async def ledger_keeps_one_attempt_of_a_sample(ledger: Ledger) -> None:
    """A new attempt drops what the old one left open, fan-out siblings too, and stands for the sample from then on."""
    first, second = sample_group(0, fan_out=True), sample_group(0)
    for sample in second.samples:
        sample.attempt, sample.response = 1, "again"
    await ledger.issue([_issued(first)])
    await ledger.finish(first)
    await ledger.issue([second])
    known = (await ledger.groups(["main/0"]))["main/0"]
    assert (known.state, known.attempt, known.drops) == ("pending", 1, {}), known
    await _refused(ledger.finish(first), "an attempt that was given up finished")
    await ledger.finish(second)
    known = (await ledger.groups(["main/0"]))["main/0"]
    assert (known.state, [s.response for s in known.samples]) == ("finished", ["again", "again"]), known
    assert (await ledger.counts())["dropped/restarted"] == 3
    assert await _balance(ledger) == (5, 0, 3, 2)


async def ledger_keeps_suspended_turns(ledger: Ledger) -> None:
    """What unfinished samples made returns bit for bit, without the tokens of later versions, also after the end."""
    groups = [sample_group(position) for position in range(2)]
    await ledger.issue(groups)
    names = [sample.id for group in groups for sample in group.samples]
    turns = {name: suspended_turns(name) for name in names[:3]}
    await ledger.suspend({**turns, names[0]: turns[names[0]][:1]})
    await ledger.suspend({names[0]: turns[names[0]]})
    assert await ledger.suspended(names, before=100) == turns
    assert await ledger.suspended(names[:1], before=0) == {}
    cut = (await ledger.suspended(names, before=4))[names[1]]
    first, second = turns[names[1]]
    assert cut[0] == first, "a turn without later tokens changed"
    assert (cut[1].finish, [piece.versions for piece in cut[1].pieces]) == ("", [[3], [3]]), cut[1]
    assert cut[1].pieces[1].log_probs == second.pieces[1].log_probs[:1]
    await ledger.finish(groups[0])
    await ledger.drop([(groups[1].samples, Drop(reason="x"))])
    await ledger.suspend({name: kept[:1] for name, kept in turns.items()})
    assert await ledger.suspended(names, before=100) == turns, "a step made again needs what samples kept that ended"
    known = (await ledger.groups([groups[1].prompt.id]))[groups[1].prompt.id]
    assert (known.state, known.samples, known.drops) == ("dropped", [], {"x": 2}), known
    known = (await ledger.groups([groups[0].prompt.id]))[groups[0].prompt.id]
    await ledger.drop([(groups[0].samples, Drop(reason="surplus"))])
    again = (await ledger.groups([groups[0].prompt.id]))[groups[0].prompt.id]
    assert (again.state, again.last_reason, again.drops) == ("dropped", "surplus", {}), again
    assert again.samples == known.samples, "what was finished before it was dropped is still there"


async def ledger_drops_and_finishes_in_one_step(ledger: Ledger) -> None:
    """Where the group cannot finish, nothing of it is dropped either; the first reason of a drop stands."""
    group, other = sample_group(0), sample_group(1)
    await ledger.issue([group, other])
    await ledger.drop([(group.samples[1:], Drop(reason="first"))])
    await _refused(ledger.finish(group, [(other.samples, Drop(reason="second"))]), "a dropped sample finished")
    assert await _balance(ledger) == (4, 0, 1, 3)
    await ledger.drop([(group.samples, Drop(reason="third"))])
    counts = await ledger.counts()
    assert (counts["dropped/first"], counts["dropped/third"]) == (1, 1), dict(counts)


async def ledger_forgets_payloads_and_no_rows(ledger: Ledger) -> None:
    """Pruning forgets what trained long ago and what was dropped; counts, journals and later payloads stay."""
    from slime_core.trainers.batch import make_batch

    groups = [sample_group(position) for position in range(5)]
    await ledger.issue(groups)
    for group in groups:
        await ledger.finish(group)
    for version in range(3):
        await ledger.journal(make_batch(version, "main", [groups[version]]))
        await ledger.trained(version + 1, f"f{version + 1}")
    await ledger.drop([(groups[3].samples, Drop(reason="x"))])
    before = dict(await ledger.counts())
    for _ in range(2):
        await ledger.prune(3)
        assert dict(await ledger.counts()) == before
    for gone in (groups[0], groups[1], groups[3]):
        await _refused(ledger.samples([gone.samples[0].id]), "a payload is still there")
    kept = [sample for group in (groups[2], groups[4]) for sample in group.samples]
    assert [s.to_dict() for s in await ledger.samples([s.id for s in kept])] == [s.to_dict() for s in kept]
    assert await ledger.composition(1) == [sample.id for sample in groups[0].samples]
    assert (await ledger.groups(["main/0"]))["main/0"] == GroupRecord(
        state="trained", version=1, newest=0, ticks={"main/0-0": 2, "main/0-1": 2}
    )
    await ledger.rewind(2)
    await _refused(ledger.rewind(1), "it went back to where payloads are gone")


def suspended_turns(name: str) -> list[RequestTurn]:
    """Two turns of one sample: one that ended, and one under way, in pieces of versions 3 and 4."""
    params = SamplingParams(max_new_tokens=9, temperature=0.7, stop=("\n", "é"), stop_token_ids=(0,))
    request = GenerateRequest(id=name, tokens=[1, 2], params=params, seed=2**63 + 11, session_id="s", kept=1)
    parts: list[tuple[list[int], Literal["stop", "length", "abort"]]] = [
        ([3, 3], "stop"),
        ([3], "abort"),
        ([3, 4], "abort"),
    ]
    pieces = [
        Completion(
            id=name,
            tokens=[5 + i for i, _ in enumerate(versions)],
            log_probs=[-0.1 / (i + 3) for i, _ in enumerate(versions)],
            plain_log_probs=[-0.0, -1e-300][: len(versions)],
            finish=finish,
            versions=versions,
            epoch=2,
            text="1+1",
        )
        for versions, finish in parts
    ]
    first = RequestTurn(request=request, pieces=pieces[:1], finish="stop")
    return [first, RequestTurn(request=replace(request, tokens=[1, 2, 5, 6, 9], kept=0), pieces=pieces[1:])]


def _issued(group: Group) -> Group:
    """The group as it is before a fan-out: one sample a rollout."""
    samples = [sample for sample in group.samples if "." not in sample.id]
    rollouts = {sample.rollout_id or 0: [i] for i, sample in enumerate(samples)}
    return Group(prompt=group.prompt, samples=samples, rollouts=rollouts)


async def _refused(call: Awaitable[object], broken: str) -> None:
    try:
        await call
    except SlimeError:
        return
    raise AssertionError(broken)


async def _balance(ledger: Ledger) -> tuple[int, int, int, int]:
    counts = await ledger.counts()
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    assert counts["issued"] == counts["trained"] + dropped + counts["pending"], dict(counts)
    return counts["issued"], counts["trained"], dropped, counts["pending"]


LEDGER_CHECKS: tuple[LedgerCheck, ...] = (
    ledger_keeps_every_sample_in_one_state,
    ledger_journals_a_step_before_it_trains,
    ledger_reads_back_what_was_finished,
    ledger_recalls_what_it_knows_of_a_group,
    ledger_goes_back_to_an_earlier_version,
    ledger_keeps_one_attempt_of_a_sample,
    ledger_keeps_suspended_turns,
    ledger_drops_and_finishes_in_one_step,
    ledger_forgets_payloads_and_no_rows,
)
