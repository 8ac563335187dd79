"""Dialogues on a scripted policy before the real judge: told what is wrong until it is right; a run that is killed."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from actors import context, fenced, pending
from click.testing import CliRunner
from staged import RELUS, TOKENIZER, before_the_real_judge

from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench import run as kernelbench
from slime_kernelbench.commands import kernelbench as commands
from slime_kernelbench.dialogue.words import load_words
from slime_kernelbench.judge import JudgeOptions, LocalJudge
from slime_kernelbench.options import Options
from slime_kernelbench.problems import shipped
from slime_kernelbench.records import FILE, read
from slime_kernelbench.types import KernelProblem

pytestmark = pytest.mark.integration


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


def test_the_example_that_every_prompt_shows_is_right_by_the_rules_that_it_names():
    module, answer = re.findall(r"```python\n(.*?)```", load_words("").user, re.DOTALL)[:2]

    async def play():
        async with LocalJudge(JudgeOptions(workers=1)) as judge:
            return await judge.judge(answer, KernelProblem(id="example", name="add", source=module))

    verdict = asyncio.run(play())
    assert (verdict.status, verdict.flags) == ("correct", ()), verdict.diagnostics


@pytest.mark.nightly
def test_a_run_that_is_killed_between_judgements_goes_on_and_is_the_run_that_was_not(tmp_path):
    problem = next(problem for problem in shipped() if problem.id.endswith("/relu"))
    relu = tmp_path / "relu.py"
    relu.write_text(problem.source)
    whole, killed = (before_the_real_judge(tmp_path / name, relu) for name in ("whole", "killed"))
    assert whole.start() == 3
    script = [sys.executable, str(Path(__file__).with_name("staged.py")), str(killed.path), str(relu)]
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
