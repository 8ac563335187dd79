"""Whole runs whose samples come from an agent that speaks OpenAI's API over plain HTTP, with the embedded engine."""

import json
import signal
from collections import Counter

import pytest
from recorded import steps_of

from slime_core.testing import tiny_model
from slime_core.testing.models import CHAT_TEMPLATE

pytestmark = pytest.mark.system

AGENT = '''
import asyncio, json, os, signal, urllib.request

from slime_chat import converse
from slime_core.types import Reward


def ask(session, messages, **given):
    body = json.dumps({"messages": messages, **given}).encode()
    head = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
    asked = urllib.request.Request(session.base_url + "/chat/completions", body, head)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]


def work(session):
    """Three turns, of which the second is asked twice and the third is cooler; then a dialogue that begins anew."""
    said = [{"role": "user", "content": session.sample.prompt}]
    said += [ask(session, said), {"role": "user", "content": "sure?"}]
    first, second = ask(session, said), ask(session, said)
    if session.sample.id == "main/5-0" and os.path.exists("kill"):
        os.remove("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    ask(session, [*said, second, {"role": "user", "content": "so?"}], temperature=0.5)
    ask(session, [{"role": "user", "content": "in short"}])


async def generate(group, ctx):
    return await converse(group, ctx, lambda session: asyncio.to_thread(work, session))


def reward(group, ctx):
    return [Reward(value=float(sum(map(str.isdigit, s.response)) > 1)) for s in group.samples]
'''


@pytest.fixture
def train(forked_slime, tmp_path):
    tiny_model(tmp_path / "model", hidden=32, chat_template=CHAT_TEMPLATE)
    rows = [{"q": f"{a}+{b}=", "a": str(a + b)} for a in range(4) for b in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)

    def train(name, *flags, code=0):
        done = forked_slime(
            *(
                "run",
                "--hf-checkpoint",
                "model",
                "--prompt-data",
                "rows.jsonl",
                "--input-key",
                "q",
                "--label-key",
                "a",
            ),
            *("--custom-generate-function-path", "agent.py:generate", "--custom-rm-path", "agent.py:reward"),
            *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--lr", "1e-2"),
            *(
                "--rollout-max-response-len",
                "6",
                "--dtype",
                "float32",
                "--cpu-threads",
                "1",
                "--run-dir",
                name,
                *flags,
            ),
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
        return tmp_path / name

    return train


def metrics_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind", "step") == "step"]


def test_an_agents_branches_train_on_the_log_probs_that_the_trainer_has_too_and_again_alike(train):
    run = train("one", "--eval-prompt-data", "few", "rows.jsonl", "--eval-interval", "2")
    steps, counts = steps_of(run, 2)
    assert counts["issued"] == counts["trained"] + sum(n for name, n in counts.items() if name.startswith("dropped/"))
    for step, told in zip(steps, metrics_of(run), strict=True):
        rollouts = Counter(sample.rollout_id for sample in step)
        assert set(rollouts.values()) == {4}  # two branches, the cooler turn, the dialogue that began anew
        for sample in step:
            assert sample.metadata["chat"]["calls"] == 5
            assert (sample.metadata["chat"]["branches"], sample.metadata["chat"]["forks"]) == (3, 1)
        assert Counter(sample.temperature for sample in step) == {1.0: 3 * len(rollouts), 0.5: len(rollouts)}
        assert told["metrics"]["train_rollout_logprob_abs_diff"] < 1e-5
    again, _ = steps_of(train("two"), 2)
    assert [sample.to_dict() for step in again for sample in step] == [
        sample.to_dict() for step in steps for sample in step
    ]


@pytest.mark.nightly
def test_a_run_that_is_killed_within_an_agents_dialogue_ends_in_the_same_weights(train, forked_slime, tmp_path):
    ahead = ("--max-staleness", "1", "--no-colocate")  # in lockstep
    whole = train("whole", *ahead)
    (tmp_path / "kill").touch()
    killed = train("killed", *ahead, code=-signal.SIGKILL)
    assert not (tmp_path / "kill").exists()
    resumed = forked_slime("run", "--resume", killed, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    steps, counts = zip(*(steps_of(run, 2) for run in (whole, killed)), strict=True)
    assert counts[1]["issued"] == counts[1]["trained"] == counts[0]["trained"]
    assert [sample.to_dict() for step in steps[1] for sample in step] == [
        sample.to_dict() for step in steps[0] for sample in step
    ]
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (whole, killed)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("flags", [(), ("--partial-rollout",)], ids=["dropped", "continued"])
def test_sessions_that_the_run_stops_are_dropped_or_go_on(train, flags):
    run = train("over", "--over-sampling-batch-size", "6", "--lr", "0", *flags)
    steps, counts = steps_of(run, 2)
    assert counts["dropped/over_sampled"]
    assert [len({sample.rollout_id for sample in step}) for step in steps] == [8, 8]
    for sample in (sample for step in steps for sample in step):
        assert sample.metadata["chat"]["calls"] == 5
    assert all(told["metrics"]["train_rollout_logprob_abs_diff"] < 1e-5 for told in metrics_of(run))
