"""Whole runs of dialogues on a scripted policy: real loop, ledger, checkpoints, records; cut off anywhere, resumed."""

import asyncio
import json

import pytest
from actors import BROKEN, INFRA, RIGHT, WRONG, Known, timed
from staged import JUDGED, KINDS, Late, Run

from slime_core import ConfigError, DataError
from slime_kernelbench.records import FILE, PROBLEMS, read
from slime_kernelbench.rescore import kernels, rescore

pytestmark = pytest.mark.unit


def test_a_run_of_dialogues_trains_each_turn_and_writes_each_down(tmp_path):
    run = Run(tmp_path / "run")
    assert run.start() == 3
    counts, _, samples = run.ledger()
    assert counts["pending"] == 0
    assert counts["issued"] == counts["trained"] + sum(n for name, n in counts.items() if name.startswith("dropped/"))
    assert len(samples) > 24, "turns beyond the 24 first ones train"
    told = {turn["id"]: turn for turn in read(run.path)}
    for name, sample in samples.items():
        turn = told[name]
        assert turn["prompt_ids"] + turn["answer_ids"] == sample.tokens
        assert turn["return"] == pytest.approx(sample.reward)
        assert turn["source"] == sample.metadata["kernelbench"]["source"]
        assert turn["verdict"]["status"] == sample.metadata["kernelbench"]["verdict"]["status"]
        assert name == (f"{turn['group']}-{turn['rollout'] % 4}" + (f".{turn['turn']}" if turn["turn"] else ""))
    sampled = {(tuple(r.tokens), tuple(a.tokens)) for r, a in zip(run.engine.requests, run.engine.answers)}
    assert {(tuple(turn["prompt_ids"]), tuple(turn["answer_ids"])) for turn in told.values()} == sampled
    sources = [
        turn["source"] for turn in told.values() if turn["source"] is not None and not turn["verdict"]["cached"]
    ]
    assert sorted(run.judge.asked) == sorted(sources), "each kernel was judged once"


def test_metrics_tell_of_each_turn(tmp_path):
    run = Run(tmp_path / "run")
    run.start()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if line["kind"] == "step")["metrics"]
    for name in (
        "turn1_correct",
        "turn1_compiled",
        "turn2_correct",
        "solved",
        "turns",
        "own",
        "hack",
        "seconds_judge",
    ):
        assert f"reward/{name}/mean" in step
    assert 0 < step["reward/solved/mean"] <= 1


def test_what_cannot_be_judged_is_dropped_with_its_reason_and_never_trained(tmp_path):
    run = Run(tmp_path / "run", verdicts={"broken": INFRA, "right": RIGHT})
    assert run.start() == 3
    counts, _, samples = run.ledger()
    assert counts["dropped/infra_error"] > 0
    assert all("broken" not in (s.metadata["kernelbench"]["source"] or "") for s in samples.values())
    masked = [turn for turn in read(run.path) if turn["return"] is None]
    assert masked
    assert {turn["kind"] for turn in masked} == {"infra_error"}
    assert not {turn["id"] for turn in masked} & set(samples)
    unjudged = {turn["rollout"] for turn in masked}
    assert not [s for s in samples.values() if s.rollout_id in unjudged], "nor is what led to it"


@pytest.mark.parametrize(
    "kind", ["partial", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS if kind != "partial")]
)
def test_a_run_that_is_cut_off_again_and_again_is_the_run_that_was_not(kind, tmp_path):
    whole, cut = Run(tmp_path / "whole", KINDS[kind]), Run(tmp_path / "cut", KINDS[kind])
    assert whole.start() == 3
    for milliseconds in (15, 40, 80, 130, 200):
        if cut.start(cut=milliseconds) is not None:
            break
    assert cut.start() == 3
    assert cut.final() == whole.final()
    assert cut.ledger()[1] == whole.ledger()[1]
    trained = set(cut.ledger()[2])
    first = {turn["id"]: turn["return"] for turn in read(whole.path) if turn["id"] in trained}
    again = {turn["id"]: turn["return"] for turn in read(cut.path) if turn["id"] in trained}
    assert first == again
    lines = [json.loads(line) for line in (cut.path / FILE).read_text().splitlines()]
    keys = [(line["id"], line["attempt"]) for line in lines if line["version"] == 0 or kind == "sync"]
    assert len(keys) == len(set(keys)), "a turn was written twice"


FREE = {
    "restart": ["--max-staleness", "1", "--no-colocate", "--stale-policy", "restart"],
    "drop": ["--max-staleness", "1", "--no-colocate", "--stale-policy", "drop"],
    "partial": ["--over-sampling-batch-size", "5", "--partial-rollout", "--use-tis"],
}


@pytest.mark.parametrize("kind", FREE)
def test_where_groups_are_taken_as_they_finish_nothing_is_lost_or_doubled(kind, tmp_path):
    run = Run(tmp_path / "run", [*FREE[kind], "--async-schedule", "free"], engine=Late)
    run.start(cut=60)
    assert run.start() == 3
    counts, steps, samples = run.ledger()
    assert counts["pending"] == 0
    assert counts["issued"] == counts["trained"] + sum(n for name, n in counts.items() if name.startswith("dropped/"))
    assert counts["trained"] == len(samples) == sum(map(len, steps))
    told = {(turn["id"], turn["attempt"]): turn for turn in read(run.path)}
    for sample in samples.values():
        turn = told[sample.id, sample.attempt]
        assert turn["prompt_ids"] + turn["answer_ids"] == sample.tokens


@pytest.mark.parametrize("shape", ["log", "saturating", "linear"])
def test_no_reward_of_the_range_is_filtered(shape, tmp_path):
    """TritonForge's buffer keeps rewards from 0 to 1 and so drops every fast kernel."""
    speeds = {"wrong": 0.01, "broken": 3.0, "right": 1e4}
    flags = ["--speed-shape", shape, "--gamma", "0", "--early-end", "nothing"]
    run = Run(tmp_path / "run", flags, {mark: timed(speed) for mark, speed in speeds.items()})
    assert run.start() == 3
    counts, _, samples = run.ledger()
    assert [name for name in counts if name.startswith("dropped/")] == []
    assert counts["trained"] == counts["issued"] == len(samples)
    rewards = [sample.reward for sample in samples.values()]
    assert min(rewards) == 0.0
    assert max(rewards) > {"log": 7, "saturating": 1.49, "linear": 5000}[shape]


def test_an_evaluation_tells_what_dialogues_solve_and_writes_them_down(tmp_path):
    sets = 'eval.eval_tasks=[{name="kernelbench_heldout"}]'
    run = Run(tmp_path / "run", [sets, "--n-samples-per-eval-prompt", "2", "--eval-interval", "2"])
    assert run.start() == 3
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    found = [line["metrics"] for line in lines if line["kind"] == "eval"]
    assert len(found) == 2
    told = [turn for turn in read(run.path) if turn["evaluation"]]
    assert {turn["version"] for turn in told} == {2, 3}
    last = [turn for turn in told if turn["version"] == 3]
    solved = {turn["rollout"] for turn in last if turn["verdict"]["status"] == "correct"}
    rollouts = {turn["rollout"] for turn in last}
    assert 0 < len(solved) < len(rollouts)
    assert found[-1]["reward/solved/mean"] == pytest.approx(len(solved) / len(rollouts))
    ends = [turn for turn in last if turn["turn"] + 1 == turn["turns"]]
    assert {turn["rollout"] for turn in ends if turn["return"] >= 1} == solved


def test_core_weights_that_would_replace_the_returns_are_refused_at_the_start(tmp_path):
    run = Run(tmp_path / "run", ["reward.reward_weights={correct = 1.0}"])
    with pytest.raises(ConfigError) as caught:
        run.start()
    assert caught.value.code == "CFG04"


def test_a_disk_that_is_full_costs_the_lines_and_not_the_run(tmp_path):

    class Hindered(Run):
        def _cluster(self, config, plugins, report):
            (report.run_dir.path / "kernelbench").write_text("in the way")
            return super()._cluster(config, plugins, report)

    run = Hindered(tmp_path / "run")
    assert run.start() == 3
    assert run.ledger()[0]["pending"] == 0


def test_single_turn_is_a_setting(tmp_path):
    run = Run(tmp_path / "run", ["--max-turns", "1"])
    assert run.start() == 3
    assert len(run.ledger()[2]) == 24


def test_kernels_of_a_run_can_be_judged_again(tmp_path):
    run = Run(tmp_path / "run")
    run.start(cut=60)
    assert run.start() == 3
    found = kernels(run.path)
    told = [turn for turn in read(run.path) if turn["source"] is not None]
    assert sum(kernel.times for kernel in found) == len(told)
    assert len(found) == len({(turn["problem"], turn["source"]) for turn in told})
    rows = asyncio.run(rescore(found, Known(JUDGED, WRONG), at_once=2))
    assert all(row["before"] == row["now"] for row in rows)
    stricter = asyncio.run(rescore(found, Known({"right": WRONG, "broken": BROKEN}, WRONG), at_once=2))
    assert {(row["before"], row["now"]) for row in stricter if row["before"] != row["now"]} == {("correct", "wrong")}
    ids = [json.loads(line)["id"] for line in (run.path / PROBLEMS).read_text().splitlines()]
    assert len(ids) == len(set(ids))
    (run.path / PROBLEMS).unlink()
    with pytest.raises(DataError) as caught:
        kernels(run.path)
    assert caught.value.code == "DAT17"
