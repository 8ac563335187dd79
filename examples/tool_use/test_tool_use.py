"""A model's code runs in the sandbox alone, what it prints does not train, and a model learns to use it."""

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

import pytest

from slime_core.config.load import load_config
from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.errors import SandboxError
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import piece_tokenizer
from slime_core.types import Group, Prompt, Sample, SamplingParams, Status

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # as a run does for a function's file

import make_problems  # noqa: E402
import retool  # noqa: E402
from interpreter import Interpreter, Settings, shortened  # noqa: E402

CONFIG = load_config(HERE / "recipe.toml")
QUESTION = "347*582=?\n"


def says(tokenizer, *turns, starved=None):
    """An engine that says the given turns, one after another; from turn ``starved`` on nothing can be started here."""
    left = enumerate(turns)

    def say(request):
        number, text = next(left)
        if number == starved:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return encode(tokenizer, text), "length" if text.endswith("...") else "stop"

    return ScriptedEngine(say, vocab_size=len(tokenizer), version=3)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(HERE / "model")


@pytest.fixture
def play(tokenizer):
    """One dialogue in which the model says the given turns; the answer is the sample, its reward and the engine.

    From turn ``starved`` on this process gets no more descriptors, so that the sandbox cannot start a candidate.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)

    def play(*turns, starved=None, sandbox_level="auto"):
        engine = says(tokenizer, *turns, starved=starved)
        rules = CONFIG.reward.model_copy(update={"sandbox_level": sandbox_level})
        sampling = SamplingParams(max_new_tokens=64)
        config = CONFIG.model_copy(update={"reward": rules})
        ctx = Context(config=config, engine=engine, tokenizer=tokenizer, sampling=sampling)
        tokens = encode(tokenizer, QUESTION)
        sample = Sample(id="grpo/0-0", prompt=QUESTION, tokens=tokens, label="201954")
        group = Group(prompt=Prompt(id="grpo/0", tokens=tokens), samples=[sample], rollouts={0: [0]})

        async def run():
            try:
                await retool.generate(group, ctx)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
                await retool.run_done(ctx)
            return retool.reward(group, ctx)[0]

        return sample, asyncio.run(run()), engine

    return play


def printed(*sources, **settings):
    """What pieces of code print, in one sandbox."""
    wanted = Settings(**{"wall_seconds": 5.0, "memory_bytes": 256 << 20, **settings})

    async def run():
        python, ctx = Interpreter(), Context(config=CONFIG)
        try:
            return [await python.run(source, wanted, ctx) for source in sources]
        finally:
            await python.aclose()

    return asyncio.run(run())


def test_output_of_code_is_appended_and_does_not_train(play, tokenizer):
    sample, reward, engine = play("<code>print(347*582)</code>", "\\boxed{201954}<eos>")
    said = ["<code>print(347*582)</code>", "\n\n<interpreter>201954</interpreter>\n\n", "\\boxed{201954}<eos>"]
    assert tokenizer.decode(sample.response_tokens) == "".join(said)
    assert sample.loss_mask == [int(part is not said[1]) for part in said for _ in encode(tokenizer, part)]
    drawn = (number for answer in engine.answers for number in answer.log_probs)
    assert sample.rollout_log_probs == [next(drawn) if mask else 0.0 for mask in sample.loss_mask]
    assert sample.weight_versions == [3 if mask else -1 for mask in sample.loss_mask]
    assert engine.requests[1].tokens == sample.tokens[: len(engine.requests[1].tokens)]
    assert (reward.kind, reward.value, reward.terms) == ("score", 1.0, {"right": 1.0, "code": 1.0})


@pytest.mark.parametrize(
    ("turns", "value", "code"),
    [
        (["\\boxed{201954}"], 1.0, 0.0),
        (["\\boxed{1} \\boxed{201,954 }"], 1.0, 0.0),
        (["201954"], 0.0, 0.0),
        (["\\boxed{201..."], 0.0, 0.0),
        (["<code>print('\\boxed{201954}')</code>", "so"], 0.0, 1.0),
        (["<code>1/0</code>", "<code>print(1)</code>", "<code>2</code>"], 0.0, 1.0),
        (["<code>\n```python\nprint(347*582)\n```\n</code>", "\\boxed{201954}"], 1.0, 1.0),
    ],
    ids=["by heart", "its last box", "no box", "cut off", "printed, not said", "out of turns", "in a fence"],
)
def test_rewards(play, turns, value, code):
    _, reward, engine = play(*turns)
    assert (reward.kind, reward.value, reward.terms["code"]) == ("score", value, code)
    assert len(engine.requests) == len(turns)


def test_code_that_walks_out_of_a_deny_list_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    secret = tmp_path / "secret.txt"
    secret.write_text("very-secret")
    environment, file, shell, parent, network = printed(
        "import statistics\nprint(dict(statistics.sys.modules['os'].environ))",
        f"import statistics\nprint(statistics.sys.modules['os'].path.exists({str(secret)!r}))\nopen({str(secret)!r})",
        f"import statistics\nstatistics.sys.modules['os'].system('cat {secret} /proc/{os.getpid()}/environ')",
        f"import os\nos.kill({os.getpid()}, 9)",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    )
    assert "'PATH'" in environment
    assert "very-secret" not in environment + file + shell
    assert file.startswith("False\n")
    assert "No such file" in file
    assert "ProcessLookupError" in parent
    assert "PermissionError" in network


def test_limits_end_code_and_are_told_to_the_model():
    waits, fills, talks, fails, ends, dies = printed(
        "print('begun', flush=True)\nwhile True: pass",
        "x = bytearray(10 << 30)",
        "print('a' * 5000)",
        "def f():\n    return 1 / 0\nf()",
        "print(1)\nimport sys\nsys.exit(3)\nprint(2)",
        "import os\nos.kill(os.getpid(), 11)",
        wall_seconds=1.0,
        output_chars=200,
    )
    assert waits == "begun\nThe code did not end in 1 s."
    assert "MemoryError" in fills
    assert talks == "a" * 100 + "\n... 4800 characters left out ...\n" + "a" * 100
    assert fails == (
        'Traceback (most recent call last):\n  File "<code>", line 3, in <module>\n  File "<code>", line 2, in f\n'
        "ZeroDivisionError: division by zero"
    )
    assert ends == "1"
    assert dies == "\nThe code was killed by SIGSEGV."


def test_a_text_that_is_short_enough_stays():
    assert shortened("abcd", 4) == "abcd"
    assert shortened("abcdefg", 4) == "ab\n... 3 characters left out ...\nfg"


def test_a_sandbox_that_fails_is_no_fault_of_the_models(play):
    sample, reward, _ = play("<code>print(7)</code>", "<code>print(8)</code>", starved=1)
    assert (reward.kind, sample.status) == ("infra_error", Status.FAILED)
    assert reward.reason.startswith("the sandbox: ")
    assert "<interpreter>7</interpreter>" in sample.response
    _, reward, _ = play("<code>print(7)</code>", "\\boxed{201954}")
    assert reward.value == 1.0, "the next run opens another one"


def test_a_level_that_cannot_be_had_ends_the_run_with_its_own_error(play):
    with pytest.raises(SandboxError, match="runs code from a model with your rights"):
        play("<code>print(7)</code>", sandbox_level="none")


def test_the_shipped_files_are_those_that_the_generator_writes(tmp_path):
    made = make_problems.rows()
    few = made["traces"][:20]
    asyncio.run(make_problems.run_code(few))
    for name, rows in made.items():
        lines = (HERE / "data" / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == len(rows)
        compared = few if name == "traces" else rows
        assert [json.loads(line) for line in lines[: len(compared)]] == compared, "run make_problems.py"
    piece_tokenizer(make_problems.PIECES).save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_text() == (HERE / "model" / "tokenizer.json").read_text()


def test_no_held_out_problem_is_in_training_and_guesses_are_wrong():
    made = {
        name: (HERE / "data" / f"{name}.jsonl").read_text().splitlines() for name in ("traces", "train", "heldout")
    }
    rows = {name: [json.loads(line) for line in lines] for name, lines in made.items()}
    seen = {row["question"] for name in ("traces", "train") for row in rows[name]}
    assert not seen & {row["question"] for row in rows["heldout"]}
    guesses = [row for row in rows["traces"] if len(row["metadata"]["trace"]) == 1]
    assert 0.55 < len(guesses) / len(rows["traces"]) < 0.65
    assert not [row for row in guesses if row["answer"] in row["metadata"]["trace"][0]]


def test_a_short_run_uses_the_interpreter_and_is_judged(train, scores):
    flags = ("stage.warmup.num_rollout=5", "stage.grpo.num_rollout=2")
    assert [0 <= score < 0.5 for score in scores(train(HERE / "recipe.toml", *flags), "heldout")] == [True, True]


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_model_learns_to_use_the_interpreter(train, scores):
    run = train(HERE / "recipe.toml")
    after_warmup, after_grpo = scores(run, "heldout")
    assert after_warmup < 0.5
    assert after_grpo > 0.7
