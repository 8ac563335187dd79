"""An agent's tools run in the sandbox, hidden tests judge what it leaves, and a model learns to use them."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.errors import DataError
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import piece_tokenizer
from slime_core.types import Group, Prompt, Sample, SamplingParams

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # as a run does for a function's file

import coder  # noqa: E402
import harbor  # noqa: E402
import make_tasks  # noqa: E402
from workspace import Workspaces, reward_in  # noqa: E402

CONFIG = load_config(HERE / "recipe.toml")
TASK = make_tasks.task("rate", ("n", "k"), "add", "multiply")
LOOK = make_tasks.CALL.format("bash", json.dumps({"command": "cat shop/core.py"}))
GUESS = make_tasks.CALL.format("edit", json.dumps({"path": "shop/core.py", "old": "g + k", "new": "g * k"}))
FIX = make_tasks.CALL.format("edit", json.dumps({"path": "shop/core.py", "old": "n + k", "new": "n * k"}))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(HERE / "model")


@pytest.fixture
def play(tokenizer):
    """One agent in which the model gives these answers; its sample and reward."""

    def play(*answers, task=TASK):
        lines = iter([*answers, *["done"] * 9])
        engine = ScriptedEngine(lambda request: (encode(tokenizer, f"{next(lines)}<eos>"), "stop"), vocab_size=131)
        ctx = Context(config=CONFIG, engine=engine, tokenizer=tokenizer, sampling=SamplingParams(max_new_tokens=99))
        sample = Sample(id="grpo/0-0", prompt=task["question"], metadata=dict(task["metadata"]), session_id="0")
        group = Group(prompt=Prompt(id="grpo/0"), samples=[sample], rollouts={0: [0]})

        async def run():
            try:
                await coder.generate(group, ctx)
            finally:
                await coder.run_done(ctx)
            return coder.reward(group, ctx)[0]

        return sample, asyncio.run(run()).value

    return play


def in_workspace(task, work):
    """What ``work(workspace, workspaces, ctx)`` returns."""

    async def run():
        workspaces, ctx = Workspaces(), Context(config=CONFIG)
        try:
            async with workspaces.open(task, ctx) as workspace:
                return await work(workspace, workspaces, ctx)
        finally:
            await workspaces.aclose()

    return asyncio.run(run())


def test_an_agent_that_looks_and_edits_is_rewarded_by_the_hidden_cases(play, tokenizer):
    sample, value = play(LOOK, FIX, "done")
    results = ["def rate(n, k):\n    return n + k", "edited"]
    parts = [LOOK, f"<tool>{results[0]}", FIX, f"<tool>{results[1]}", "done"]
    text = "<eos><assistant>".join(parts).replace("<assistant><tool>", "<tool>") + "<eos>"
    assert tokenizer.decode(sample.response_tokens) == text
    trained = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"{LOOK}<eos>{FIX}<eos>done<eos>"
    assert value == 1.0


def test_guesses_nonsense_and_attacks_earn_nothing(play):
    cheat = "import os\\nclass rate(int):\\n    def __eq__(self, other): return True\\ndef rate(*_): os._exit(0)"
    attack = make_tasks.CALL.format("bash", json.dumps({"command": f"printf '{cheat}' > shop/core.py"}))
    ending = make_tasks.CALL.format("bash", json.dumps({"command": "kill -9 $PPID"}))
    unknown = make_tasks.CALL.format("fly", "{}")
    assert [play(*answers)[1] for answers in ([GUESS], [attack], [ending, FIX], [unknown], ["done"])] == [0.0] * 5


def test_tools_say_what_went_wrong_and_end_with_their_time(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("very-secret")

    async def work(workspace, workspaces, ctx):
        calls = [
            ("bash", {"command": "echo out; echo err >&2; exit 3"}),
            ("bash", {"command": "sleep 60", "seconds": 0.5}),
            ("edit", {"path": "shop/none.py", "old": "a", "new": "b"}),
            ("edit", {"path": "shop/core.py", "old": "n", "new": "b"}),
            ("edit", {"file": "x"}),
            ("bash", {"command": "python -c 'print(8 * 1000)'"}),
            ("bash", {"command": "seq 10000"}),
            ("bash", {"command": f"ls /app/shop; cat {secret}"}),
        ]
        return [await workspace.call(name, arguments) for name, arguments in calls]

    failed, late, missing, often, wrong, python, long, inside = in_workspace(TASK["metadata"], work)
    assert failed == "out\nerr\nexit code 3"
    assert late == "the command did not end in 0.5 s"
    assert missing.startswith("FileNotFoundError")
    assert often == "the text occurs 3 times"
    assert wrong.startswith("TypeError")
    assert python == "8000"
    assert long.endswith("characters left out")
    assert "core.py" in inside
    assert "exit code 1" in inside, "nothing of the run's is there"
    assert "very-secret" not in inside


@pytest.fixture
def folder(tmp_path):
    """A task folder in harbor's format."""
    task = tmp_path / "fix-greeting"
    texts = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[environment]\ncpus = 1\n',
        "instruction.md": "Make /app/greet.py print hello.\n",
        "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\n# the package\nCOPY src/ ./\n",
        "environment/src/greet.py": "print('hell')\n",
        "tests/test.sh": "#!/bin/bash\nif python /tests/check.py; then echo 1 > /logs/verifier/reward.txt\n"
        "else echo 0 > /logs/verifier/reward.txt; fi\n",
        "tests/check.py": "import subprocess\n"
        "assert subprocess.check_output(['python', '/app/greet.py']) == b'hello\\n'\n",
        "solution/solve.sh": "sed -i 's/hell/hello/' /app/greet.py\n",
    }
    for name, text in texts.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return task


def test_a_task_folder_is_solved_by_its_solution_and_by_nothing_else(folder):
    row = harbor.read_task(folder)
    assert row["question"] == "Make /app/greet.py print hello.\n"
    assert row["metadata"]["files"] == {"greet.py": "print('hell')\n"}

    async def work(workspace, workspaces, ctx):
        before = await workspaces.verify(row["metadata"], await workspace.files(), ctx)
        await workspace.call("bash", {"command": row["metadata"]["solution"]})
        return before, await workspaces.verify(row["metadata"], await workspace.files(), ctx)

    assert in_workspace(row["metadata"], work) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "environment/Dockerfile",
            "FROM python:3.11\nRUN apt-get install -y git\n",
            "says 'RUN apt-get install -y git'",
        ),
        ("environment/Dockerfile", "FROM ubuntu:24.04\n", "says 'FROM ubuntu:24.04'"),
        ("environment/Dockerfile", "FROM python:3.11\nCOPY src /etc/x\n", "outside of /app"),
        ("environment/docker-compose.yaml", "services: {}\n", "environment/docker-compose.yaml"),
        ("task.toml", '[environment]\ndocker_image = "swe:1"\n', "environment.docker_image = 'swe:1'"),
    ],
    ids=["RUN", "image", "COPY", "compose", "docker_image"],
)
def test_a_task_that_needs_docker_is_refused_with_its_reason(folder, name, text, reason):
    (folder / name).write_text(text)
    with pytest.raises(DataError, match="the task fix-greeting needs Docker") as caught:
        harbor.read_task(folder)
    assert reason in caught.value.why


def test_a_folder_that_is_no_task_is_refused(folder):
    shutil.rmtree(folder / "tests")
    with pytest.raises(DataError, match=r"has no tests/test\.sh"):
        harbor.read_task(folder)
    assert [reward_in(text) for text in ("1", '{"reward": 0.5}')] == [1.0, 0.5]
    assert coder.arguments_of({"function": {"arguments": "[" * 100_000}}) is None
    assert not any(map(reward_in, ("nan", "7", "x", "{}", "9" * 400, "[" * 100_000)))


def test_the_shipped_files_are_those_that_the_generator_writes(tmp_path):
    rows_by_file = make_tasks.rows()
    few = rows_by_file["traces"][:20]
    asyncio.run(make_tasks.run_calls(few))
    for name, rows in rows_by_file.items():
        lines = (HERE / "data" / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == len(rows)
        compared = few if name == "traces" else rows
        assert [json.loads(line) for line in lines[: len(compared)]] == compared, "run make_tasks.py"
    piece_tokenizer(make_tasks.PIECES).save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_text() == (HERE / "model" / "tokenizer.json").read_text()


@pytest.mark.system
def test_a_short_run_uses_the_tools_and_is_judged(train):
    run = train(HERE / "recipe.toml", "stage.warmup.num_rollout=10", "stage.grpo.num_rollout=2", "eval.eval_tasks=[]")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["metrics"] for row in rows if row["kind"] == "step" and row["stage"] == "grpo"]
    assert len(steps) == 2
    assert all(step["train_rollout_logprob_abs_diff"] < 1e-5 for step in steps)


@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_model_learns_to_look_before_it_edits(train, scores):
    after_warmup, after_grpo = scores(train(HERE / "recipe.toml"), "heldout")
    assert after_warmup < 0.5
    assert after_grpo > 0.7
