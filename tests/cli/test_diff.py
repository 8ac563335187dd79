"""Two ledgers compared: the first divergence is named in one sentence."""

import asyncio
import json
import sqlite3
from types import SimpleNamespace

import pytest

from slime_cli.replaying.compare import compare_steps
from slime_core.config.dump import to_toml
from slime_core.config.schema import Config
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.report import RunDir
from slime_core.report.recorded import groups_of, open_recorded
from slime_core.testing.contracts import sample_group

pytestmark = pytest.mark.integration


METRICS = {"loss": 0.25, "grad_norm": 1.5, "reward/mean": 0.5, "data/read": 4.0, "ledger/issued": 8.0}


def group_at(position):
    group = sample_group(position)
    for sample in group.samples:
        sample.rollout_routed_experts = None
    return group


def record(path, change=lambda step: None, steps=3):
    """A run directory of ``steps`` steps of two groups; ``change`` may alter a step before it is recorded."""
    path.mkdir()
    (path / "config.toml").write_text(to_toml(Config()))
    asyncio.run(_record(path, change, steps))
    return path


async def _record(path, change, steps):
    ledger = SqliteLedger(path)
    lines = []
    for version in range(1, steps + 1):
        step = SimpleNamespace(
            version=version,
            groups=[group_at(2 * version), group_at(2 * version + 1)],
            metrics=dict(METRICS),
            fingerprint=f"{version:032x}",
        )
        change(step)
        await ledger.issue(step.groups)
        for group in step.groups:
            await ledger.finish(group)
        ids = [s.id for g in step.groups for s in g.samples]
        await ledger.journal(SimpleNamespace(version=version - 1, stage="main", sample_ids=ids))
        await ledger.trained(version, step.fingerprint)
        lines.append({"kind": "step", "version": version, "stage": "main", "metrics": step.metrics, "seconds": {}})
    lines.append({"kind": "eval", "version": steps, "name": "held", "metrics": {"reward/mean": 0.5}, "seconds": {}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    await ledger.close()


def at_step(number, change):
    """Change one step alone."""
    return lambda step: change(step) if step.version == number else None


def compared(one, other, decode=None):
    runs = RunDir.open(one), RunDir.open(other)
    with open_recorded(runs[0]) as first, open_recorded(runs[1]) as second:
        return compare_steps(*runs, (first, second), decode)


def second(step):
    """The second sample of the first group."""
    return step.groups[0].samples[1]


def other_token(step):
    sample = second(step)
    sample.tokens[4] += 1  # three of the prompt, the second of the response


def other_prompt(step):
    second(step).tokens[1] += 1


def other_log_prob(step):
    second(step).rollout_log_probs[1] -= 1e-9


def other_reward(step):
    second(step).reward = 0.25


def other_mask(step):
    second(step).loss_mask = [1, 0, 0]


def other_advantages(step):
    second(step).advantages = [1.0, 2.0, 3.0]


def other_group(step):
    step.groups[1] = group_at(90)


def other_order(step):
    step.groups.reverse()


@pytest.mark.parametrize(
    ("change", "part", "sentence"),
    [
        (
            other_group,
            "samples",
            "step 2: other samples train (4 are in one run alone): main/5-0 and main/90-0; what the step took diverged",
        ),
        (
            other_order,
            "samples",
            "step 2: the same samples train in another order, from place 0 on: main/4-0 and main/5-0; "
            "what the step took diverged",
        ),
        (
            other_token,
            "tokens",
            "step 2: same samples; 1 of 4 samples have other tokens, first main/4-1 at response token 1: "
            "4 't4' and 5 't5'; generation diverged",
        ),
        (
            other_prompt,
            "tokens",
            "step 2: same samples; 1 of 4 samples have other tokens, first main/4-1 at prompt token 1: "
            "2 't2' and 3 't3'; the data diverged",
        ),
        (
            other_log_prob,
            "log_probs",
            "step 2: same samples and tokens; rollout log-probs differ by up to 1e-09, most in main/4-1; "
            "what the engines computed diverged",
        ),
        (
            other_reward,
            "rewards",
            "step 2: same samples, tokens and log-probs; rewards differ by up to 0.75, most in main/4-1; "
            "the rewards diverged",
        ),
        (
            other_mask,
            "masks",
            "step 2: same samples, tokens, log-probs and rewards; 1 samples have another loss mask, first main/4-1; "
            "what trains of them diverged",
        ),
        (
            other_advantages,
            "advantages",
            "step 2: same samples, tokens, log-probs, rewards and masks; stored advantages of main/4-1 are in one "
            "run alone; the advantages diverged",
        ),
        (
            lambda step: step.metrics.update(loss=0.250001),
            "metrics",
            "step 2: same samples, tokens, log-probs, rewards and masks; loss differs in the 6th digit: "
            "0.25 and 0.250001; the optimizer step diverged",
        ),
        (
            lambda step: step.metrics.update(loss=0.3, train_rollout_logprob_abs_diff=0.5),
            "metrics",
            "step 2: same samples, tokens, log-probs, rewards and masks; loss differs in the 1st digit: "
            "0.25 and 0.3; the optimizer step diverged",
        ),
        (
            lambda step: setattr(step, "fingerprint", "f" * 32),
            "weights",
            f"step 2: same samples, tokens, log-probs, rewards, masks and metrics; the weights' fingerprints are "
            f"{2:032x} and {'f' * 32}; the optimizer step diverged",
        ),
    ],
)
def test_the_first_divergence_is_one_sentence(tmp_path, change, part, sentence):
    one, other = record(tmp_path / "a"), record(tmp_path / "b", at_step(2, change))
    found = compared(one, other, lambda tokens: f"t{tokens[0]}")
    assert found.sentence() == sentence
    assert (found.first.version, found.first.first, found.equal) == (2, part, False)


def test_equal_runs_are_equal_in_every_part(tmp_path):
    found = compared(record(tmp_path / "a"), record(tmp_path / "b"))
    assert found.equal
    assert found.sentence() == "equal in all 3 steps"
    assert {part.verdict for step in found.steps for part in step.parts.values()} == {"same"}


def test_figures_of_where_samples_came_from_are_no_divergence(tmp_path):
    def change(step):
        step.metrics |= {"data/read": 9.0, "ledger/issued": 99.0, "dropped/surplus": 1.0, "new": 1.0}

    found = compared(record(tmp_path / "a"), record(tmp_path / "b", change))
    assert found.equal
    told = {"data/read": (4.0, 9.0), "ledger/issued": (8.0, 99.0), "dropped/surplus": (None, 1.0), "new": (None, 1.0)}
    assert found.steps[0].bookkeeping == told


def test_the_earliest_step_counts_and_then_the_earliest_cause(tmp_path):
    def change(step):
        if step.version >= 2:
            other_reward(step)
            step.metrics["loss"] = 9.0
            other_token(step)

    found = compared(record(tmp_path / "a"), record(tmp_path / "b", change))
    assert (found.first.version, found.first.first) == (2, "tokens")
    assert found.first.parts["rewards"].verdict == found.first.parts["metrics"].verdict == "differs"


def test_a_learning_rate_that_is_not_the_same_is_the_cause(tmp_path):
    def rated(rate, loss):
        return lambda step: step.metrics.update(lr=rate, loss=loss)

    found = compared(record(tmp_path / "a", rated(1e-3, 0.1)), record(tmp_path / "b", rated(2e-3, 0.2)))
    assert "lr differs in the 1st digit" in found.sentence()
    assert found.sentence().endswith("the learning rates are not the same")


def test_pruned_payloads_leave_rewards_metrics_and_weights_to_compare(tmp_path):
    one, other = record(tmp_path / "a"), record(tmp_path / "b", at_step(3, other_reward))
    with sqlite3.connect(other / "ledger.sqlite") as database:
        database.execute("UPDATE samples SET segment = NULL, offset = NULL, length = NULL, crc32 = NULL")
    database.close()
    found = compared(one, other)
    assert found.steps[0].parts["tokens"].verdict == "unknown"
    assert "report.ledger_keep_steps pruned them" in found.steps[0].parts["tokens"].detail
    assert (found.first.version, found.first.first) == (3, "rewards")
    assert found.sentence().startswith("step 3: same samples; rewards differ by up to 0.75")


def test_a_damaged_payload_is_told_and_not_compared(tmp_path):
    one, other = record(tmp_path / "a"), record(tmp_path / "b")
    (segment,) = (other / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(bytes(data))
    found = compared(one, other)
    assert sum(step.parts["tokens"].verdict == "unknown" for step in found.steps) == 1


def test_a_run_that_made_fewer_steps_is_equal_until_there(tmp_path):
    found = compared(record(tmp_path / "a"), record(tmp_path / "b", steps=2))
    assert not found.equal
    assert found.sentence() == "equal up to step 2; only the first run has step 3"
    assert found.only == ([3], [])


def test_evaluations_that_differ_are_told(tmp_path):
    one, other = record(tmp_path / "a"), record(tmp_path / "b")
    text = (
        (other / "metrics.jsonl")
        .read_text()
        .replace('"metrics": {"reward/mean": 0.5}', '"metrics": {"reward/mean": 1.0}')
    )
    (other / "metrics.jsonl").write_text(text)
    found = compared(one, other)
    assert found.sentence() == "evaluation held at step 3: reward/mean is 0.5 and 1.0"


def test_a_ledger_that_is_being_written_is_read_as_far_as_it_is(tmp_path):
    one, other = record(tmp_path / "a"), record(tmp_path / "b")

    async def meanwhile():
        ledger = SqliteLedger(one)
        await ledger.issue([group_at(50)])
        found = compared(one, other)
        await ledger.finish(group_at(50))
        await ledger.close()
        return found

    assert asyncio.run(meanwhile()).equal


def test_a_step_comes_back_as_its_groups(tmp_path):
    run = record(tmp_path / "a")
    with open_recorded(RunDir.open(run)) as recorded:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            recorded._db.execute("DELETE FROM members")
        members = recorded.members(2)
        groups = groups_of(members, recorded.samples(members))
        assert recorded.members(9) == []
        assert [step.fingerprint for step in recorded.steps().values()] == [f"{v:032x}" for v in (1, 2, 3)]
    wanted = [group_at(4), group_at(5)]
    assert [[s.to_dict() for s in g.samples] for g in groups] == [[s.to_dict() for s in g.samples] for g in wanted]
    assert [g.rollouts for g in groups] == [g.rollouts for g in wanted]
    assert [(g.id, g.prompt.position, g.prompt.tokens) for g in groups] == [
        (g.id, g.prompt.position, g.prompt.tokens) for g in wanted
    ]


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    run = record(tmp_path / "a")
    (run / "ledger.sqlite").unlink()
    with pytest.raises(StorageError, match="STO111"):
        open_recorded(RunDir.open(run))
