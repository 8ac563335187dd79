"""The ledger on disk: its contract, its rules, what survives a kill, and what damage is called."""

import asyncio

import numpy as np
import pytest
from books import batch_of, ids_of, query

from durability.ledger_contract import LEDGER_CHECKS
from slime_core.errors import PluginError, StorageError
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_the_ledger_on_disk_keeps_the_contract(with_ledger, check):
    with_ledger(check)


def test_everything_is_still_there_after_reopening(with_ledger):
    group = sample_group(0, fan_out=True)

    async def write(ledger):
        await ledger.issue([group, sample_group(1)])
        await ledger.finish(group)
        await ledger.drop([(sample_group(1).samples, Drop(reason="zero_std"))])
        await ledger.journal(batch_of(4, ids_of(group)))
        await ledger.trained(5, "f00d")

    async def read(ledger):
        assert await ledger.composition(5) == ids_of(group)
        back = await ledger.samples(ids_of(group))
        assert [s.to_dict() for s in back] == [s.to_dict() for s in group.samples]
        return dict(await ledger.counts())

    with_ledger(write)
    assert with_ledger(read) == {"issued": 5, "trained": 3, "pending": 0, "dropped/zero_std": 2}


def test_repeating_any_call_changes_nothing(with_ledger):
    group, other = sample_group(0), sample_group(1)

    async def body(ledger):
        for _ in range(3):
            await ledger.issue([group, other])
            await ledger.finish(group)
            await ledger.drop([(other.samples, Drop(reason="first"))])
            await ledger.journal(batch_of(0, ids_of(group)))
        for _ in range(3):
            await ledger.trained(1, "f00d")
            await ledger.issue([group, other])
            await ledger.finish(group)
        await ledger.drop([(other.samples, Drop(reason="second"))])
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 4, "trained": 2, "pending": 0, "dropped/first": 2}


def test_a_finished_payload_is_written_once(with_ledger, tmp_path):
    group = sample_group(0)

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        size = (tmp_path / "segments" / "000001.seg").stat().st_size
        await ledger.finish(group)
        assert (tmp_path / "segments" / "000001.seg").stat().st_size == size

    with_ledger(body)


def refused(error, what):
    assert isinstance(error, StorageError)
    assert what in error.what, error
    assert error.where
    return True


@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        ("drop", "finish", "is dropped and cannot be finished"),
        ("train", "drop", "is trained and cannot be dropped"),
        ("train", "restart", "is trained and cannot be issued again"),
        ("drop", "journal", "is dropped and cannot be journaled"),
        ("issue", "journal", "is pending and cannot be journaled"),
        ("train", "journal", "is trained and cannot be journaled"),
    ],
)
def test_a_sample_leaves_its_state_only_forward(with_ledger, first, then, what):
    group = sample_group(0)

    async def act(ledger, name):
        if name in ("finish", "train"):
            await ledger.finish(group)
        if name == "train":
            await ledger.journal(batch_of(0, ids_of(group)))
            await ledger.trained(1)
        if name == "drop":
            await ledger.drop([(group.samples, Drop(reason="x"))])
        if name == "restart":
            again = sample_group(0)
            for sample in again.samples:
                sample.attempt = 1
            await ledger.issue([again])
        if name == "journal":
            await ledger.journal(batch_of(7, ids_of(group)))

    async def body(ledger):
        await ledger.issue([group])
        await act(ledger, first)
        before = dict(await ledger.counts())
        with pytest.raises(StorageError) as caught:
            await act(ledger, then)
        assert refused(caught.value, what)
        assert dict(await ledger.counts()) == before
        assert await ledger.composition(8) == []

    with_ledger(body)


def test_a_later_attempt_takes_the_place_of_an_open_one(with_ledger):
    old, new = sample_group(0), sample_group(0)
    for sample in new.samples:
        sample.attempt, sample.response = 1, "again"

    async def body(ledger):
        await ledger.issue([old])
        await ledger.finish(old)
        await ledger.issue([new])
        await ledger.finish(new)
        assert [s.response for s in await ledger.samples(ids_of(new))] == ["again", "again"]
        await ledger.issue([old])
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 4, "trained": 0, "pending": 2, "dropped/restarted": 2}


def test_fan_out_siblings_stand_for_the_sample_that_was_issued(with_ledger):
    """Rollout 1 was issued as main/7-1 and came back as two samples with other names; nothing stays pending for it."""
    issued, neighbour = sample_group(7), sample_group(70)
    done = sample_group(7, fan_out=True)
    done.samples[1].id, done.samples[2].id = "main/7-1.0", "main/7-1.1"

    async def body(ledger):
        await ledger.issue([issued, neighbour])
        await ledger.finish(done)
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 6, "trained": 0, "pending": 5, "dropped/replaced": 1}


def test_samples_that_were_never_issued_are_counted_when_they_are_dropped(with_ledger):
    async def body(ledger):
        await ledger.drop([(sample_group(0).samples, Drop(reason="infra_error"))])
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 2, "trained": 0, "pending": 0, "dropped/infra_error": 2}


def test_a_step_is_journaled_in_order_and_once(with_ledger):
    groups = [sample_group(i) for i in range(3)]
    order = list(reversed(ids_of(*groups)))

    async def body(ledger):
        await ledger.issue(groups)
        for group in groups:
            await ledger.finish(group)
        await ledger.journal(batch_of(0, order))
        await ledger.journal(batch_of(0, order))
        with pytest.raises(StorageError) as caught:
            await ledger.journal(batch_of(0, order[:4]))
        assert refused(caught.value, "another composition")
        assert await ledger.composition(1) == order
        with pytest.raises(StorageError) as caught:
            await ledger.journal(batch_of(1, [order[0], order[0]]))
        assert refused(caught.value, "twice")

    with_ledger(body)


def test_a_version_trains_only_what_was_journaled_and_with_one_fingerprint(with_ledger):
    group = sample_group(0)

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        with pytest.raises(StorageError) as caught:
            await ledger.trained(1)
        assert refused(caught.value, "never journaled")
        await ledger.journal(batch_of(0, ids_of(group)))
        await ledger.trained(1, "f00d")
        with pytest.raises(StorageError) as caught:
            await ledger.trained(1, "beef")
        assert refused(caught.value, "other weights")

    with_ledger(body)


def test_a_payload_that_is_not_there_is_named(with_ledger):
    async def body(ledger):
        await ledger.issue([sample_group(0)])
        for name in ("main/0-0", "nobody"):
            with pytest.raises(StorageError, match=name):
                await ledger.samples([name])

    with_ledger(body)


def test_a_group_that_cannot_be_stored_leaves_no_trace(with_ledger):
    bad = sample_group(0)
    bad.samples[1].metadata["x"] = object()

    async def body(ledger):
        await ledger.issue([bad])
        with pytest.raises(PluginError, match="main/0-1"):
            await ledger.finish(bad)
        assert query(ledger.path.parent, "SELECT count(*) FROM samples WHERE segment IS NOT NULL") == [(0,)]
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 2, "trained": 0, "pending": 2}


def test_arrays_lie_beside_the_samples_that_refer_to_them(with_ledger, tmp_path):
    group = sample_group(0)
    experts = np.arange(30, dtype=np.int16).reshape(5, 3, 2)

    async def body(ledger):
        for sample in group.samples:
            sample.rollout_routed_experts = ledger.segments.write_array(experts)
        await ledger.issue([group])
        await ledger.finish(group)
        (back,) = await ledger.samples(["main/0-1"])
        assert np.array_equal(ledger.segments.read_array(back.rollout_routed_experts), experts)

    with_ledger(body)


def test_arrays_in_memory_are_stored_once_for_all_samples_of_a_group(with_ledger):
    group = sample_group(0)
    pixels = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    grid = np.array([[1, 2, 2]])
    for sample in group.samples:
        sample.multimodal_train_inputs = {"pixel_values": pixels, "image_grid_thw": grid}

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        places = [sample.multimodal_train_inputs for sample in group.samples]
        assert places[0] == places[1]
        for back in await ledger.samples(["main/0-0", "main/0-1"]):
            assert back.multimodal_train_inputs == places[0]
            for name, array in {"pixel_values": pixels, "image_grid_thw": grid}.items():
                np.testing.assert_array_equal(ledger.segments.read_array(back.multimodal_train_inputs[name]), array)

    with_ledger(body)


def test_groups_that_finish_together_share_a_transaction_and_fail_alone(with_ledger):
    groups = [sample_group(i) for i in range(20)]
    groups[7].samples[0].metadata["x"] = object()
    commits = []

    async def body(ledger):
        await ledger.issue(groups)
        await ledger.drop([(groups[3].samples, Drop(reason="x"))])
        await ledger.commits.run(
            lambda: ledger.commits.db.set_trace_callback(lambda text: commits.append(text == "COMMIT"))
        )
        answers = await asyncio.gather(*(ledger.finish(group) for group in groups), return_exceptions=True)
        failed = {i: type(answer) for i, answer in enumerate(answers) if answer is not None}
        assert failed == {3: StorageError, 7: PluginError}
        stored = [i for i in range(20) if i not in failed]
        back = await ledger.samples(ids_of(*(groups[i] for i in stored)))
        assert [s.to_dict() for s in back] == [s.to_dict() for i in stored for s in groups[i].samples]
        return dict(await ledger.counts())

    assert with_ledger(body) == {"issued": 40, "trained": 0, "pending": 38, "dropped/x": 2}
    assert 1 <= sum(commits) < 10
