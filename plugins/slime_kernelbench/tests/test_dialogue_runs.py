"""Whole runs of dialogues on a scripted policy: real loop, ledger, checkpoints, records; cut off anywhere, resumed.

Some are before the real judge. As a script this plays one of those into a folder: `python test_dialogue_runs.py FOLDER`.
"""

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from dialogue_actors import BROKEN, INFRA, RIGHT, WRONG, Known, context, fenced, pending, timed
from speakers import speaker

from durability.cut_runs import CutRun
from durability.ledger_audit import audit
from slime_core import ConfigError, DataError
from slime_core.config.load import load_config
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins.assemble import option_models
from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench import run as kernelbench
from slime_kernelbench.commands import kernelbench as commands
from slime_kernelbench.dialogue.words import load_words
from slime_kernelbench.options import Options
from slime_kernelbench.problems import shipped
from slime_kernelbench.records import FILE, PROBLEMS, read
from slime_kernelbench.rescore import kernels, rescore
from slime_kernelbench.types import KernelProblem

pytestmark = pytest.mark.integration

TOKENIZER = speaker("qwen3")
FLAGS = [
    *("--plugin", "kernelbench", "--num-rollout", "3", "--seed", "3", "--save-interval", "1"),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "120"),
    *("--hf-checkpoint", ".", "--advantage-estimator", "turn_rloo", "--apply-chat-template"),
    "--skip-eval-before-train",
]
KINDS = {
    "sync": [],
    "ahead": ["--max-staleness", "1", "--no-colocate"],
    "surplus": ["--over-sampling-batch-size", "4"],
    "partial": ["--over-sampling-batch-size", "4", "--partial-rollout", "--use-tis"],
}
ANSWERS = ["I cannot.", fenced("wrong"), fenced("broken"), fenced("right"), fenced("wrong again")]
JUDGED = {"broken": BROKEN, "right": RIGHT}


def answers_of(texts, remark):
    """One of the texts, by the request's own draw, and a remark with a number, so that few are the same."""

    def say(request):
        number = int.from_bytes(hashlib.blake2b(str(request.seed).encode(), digest_size=4).digest(), "big")
        text = texts[number % len(texts)].replace("\n```", remark.format(number % 97) + "\n```")
        return [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id], "stop"

    return say


class Late(ScriptedEngine):
    """Answers after as many turns of the event loop as the request's draw says."""

    async def generate(self, request):
        for _ in range(request.seed % 40):
            await asyncio.sleep(0)
        return await super().generate(request)


class Run(CutRun):
    """A run of dialogues.

    ``verdicts`` is what a known judge says; None: the real one judges.
    """

    def __init__(self, path, flags=(), verdicts=JUDGED, say=None, engine=ScriptedEngine):
        say = say or answers_of(ANSWERS, " # {}")

        def made(epoch):
            found = engine(say, vocab_size=len(TOKENIZER))
            found.epoch = epoch
            return found

        config = load_config(None, [*FLAGS, *flags], models=option_models)
        super().__init__(path, config, engine=made, tokenizer=TOKENIZER, vocab_size=len(TOKENIZER), seconds=60.0)
        self.verdicts = verdicts

    def prepare(self, plugins, report):
        if self.verdicts is not None:
            self.judge = Known(self.verdicts, WRONG)
            plugins._loaded["kernelbench"].target._run = kernelbench.KernelbenchRun(self.judge)

    def ledger(self):
        """Counts, each step's samples, and the samples themselves by id."""

        async def look():
            ledger = SqliteLedger(self.path)
            counts, steps = dict(await ledger.counts()), [await ledger.composition(v) for v in (1, 2, 3)]
            samples = {s.id: s for step in steps for s in await ledger.samples(step)}
            found = await audit(ledger)
            await ledger.close()
            assert found == []
            return counts, steps, samples

        return asyncio.run(look())


KERNEL = """\
import torch
import triton
import triton.language as tl


@triton.jit
def relu_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, FORMULA, mask=inside)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        relu_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out"""
LOADED = "tl.load(x + at, mask=inside)"
RELUS = [
    KERNEL.replace("FORMULA", f"tl.maximum({LOADED}, 0.0"),  # a parenthesis is missing
    KERNEL.replace("FORMULA", f"tl.abs({LOADED})"),
    KERNEL.replace("FORMULA", f"tl.maximum({LOADED}, 0.0)"),
]


def before_the_real_judge(path, problem):
    """A run that writes one kernel; ``problem`` is the file of what it is for."""
    flags = [f"plugin.kernelbench.problems={problem}", 'data.tasks=[{name="kernelbench_all"}]', "--judge-workers", "1"]
    flags += ["--rollout-max-response-len", "2048"]
    return Run(path, flags, None, answers_of([fenced(relu) for relu in RELUS], "\n# {}"))


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


def test_a_group_with_an_infra_verdict_is_dropped_with_its_reason_and_never_trained(tmp_path):
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


def test_a_model_is_told_what_was_wrong_until_it_is_right(tmp_path):
    problem = next(problem for problem in shipped() if problem.id.endswith("/relu"))
    turn = iter(RELUS)

    def say(request):
        return [*TOKENIZER.encode(fenced(next(turn)), add_special_tokens=False), TOKENIZER.eos_token_id], "stop"

    async def play():
        run = kernelbench.KernelbenchRun()
        engine = ScriptedEngine(say, vocab_size=len(TOKENIZER))
        ctx = context(engine, TOKENIZER, Options(judge_workers=1), new_tokens=4096)
        object.__setattr__(ctx, "run_dir", tmp_path)
        group = pending(TOKENIZER, problem=problem)
        try:
            done = await run.generate(group, ctx)
            return done, await run.reward(done, ctx)
        finally:
            await run.aclose()

    group, rewards = asyncio.run(play())
    turns = [sample.metadata["kernelbench"] for sample in group.samples]
    assert [turn["verdict"]["status"] for turn in turns] == ["compile_error", "wrong", "correct"]
    assert [turn["source"] for turn in turns] == [f"{answer}\n" for answer in RELUS]
    assert turns[-1]["ended"] == "success"
    assert "SyntaxError" in turns[0]["feedback"]
    assert "never closed" in turns[0]["feedback"]
    assert "differs by" in turns[1]["feedback"]
    assert [reward.value for reward in rewards] == pytest.approx([0.0 + 0.04 + 0.16, 0.1 + 0.4, 1.0])
    assert [turn["return"] for turn in read(tmp_path)] == pytest.approx([0.2, 0.5, 1.0])


def test_the_example_that_every_prompt_shows_is_right_by_the_rules_that_it_names(with_judge):
    module, answer = re.findall(r"```python\n(.*?)```", load_words("").user, re.DOTALL)[:2]
    problem = KernelProblem(id="example", name="add", source=module)
    verdict = with_judge(lambda judge: judge.judge(answer, problem))
    assert (verdict.status, verdict.flags) == ("correct", ()), verdict.diagnostics


@pytest.mark.nightly
def test_a_run_that_is_killed_between_judgements_goes_on_and_is_the_run_that_was_not(tmp_path):
    problem = next(problem for problem in shipped() if problem.id.endswith("/relu"))
    relu = tmp_path / "relu.py"
    relu.write_text(problem.source)
    whole, killed = (before_the_real_judge(tmp_path / name, relu) for name in ("whole", "killed"))
    assert whole.start() == 3
    script = [sys.executable, __file__, str(killed.path), str(relu)]
    # turns are written, the group is not kept
    die = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SLIME_FAILPOINT": "ledger.finish.written:3=kill"}
    ended = subprocess.run(script, env=die, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -9, ended.stderr
    assert killed.start() == 3
    assert killed.final() == whole.final()
    assert killed.ledger()[1] == whole.ledger()[1]
    assert {turn["verdict"]["status"] for turn in read(killed.path)} == {"compile_error", "wrong", "correct"}
    lines = [json.loads(line) for line in (killed.path / FILE).read_text().splitlines()]
    assert {line["revision"] for line in lines} == {0}, "what was judged again had other inputs"
    last = {line["id"]: line["return"] for line in lines}
    assert last == pytest.approx({turn["id"]: turn["return"] for turn in read(whole.path)})
    again = CliRunner().invoke(commands, ["rescore", str(killed.path), "--workers", "1", "--json"])
    assert again.exit_code == 0, again.output
    rows = json.loads(again.stdout)
    assert sum(row["times"] for row in rows) == len(read(killed.path))
    assert all(row["before"] == row["now"] for row in rows)


if __name__ == "__main__":
    before_the_real_judge(Path(sys.argv[1]), sys.argv[2]).start()
