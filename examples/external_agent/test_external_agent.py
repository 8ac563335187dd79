"""The example as it stands, with a witness beside the engine: what trains is what the engine read and made, once."""

import asyncio
import json
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from slime_core.ledger.ledger import SqliteLedger

HERE = Path(__file__).parent
SHORT = (
    "stage.warmup.num_rollout=10",
    "stage.grpo.num_rollout=2",
    "stage.grpo.rollout_batch_size=2",
    "eval.eval_tasks=[]",
)
WITNESS = """
import dataclasses, importlib.util, json, os

spec = importlib.util.spec_from_file_location("agents_of_the_example", os.environ["AGENTS"])
agents = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agents)


class Watched:
    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        done = await self._engine.generate(request)
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps([request.tokens, done.tokens, done.log_probs, done.versions]) + "\\n")
        return done


async def generate(group, ctx):
    return await agents.generate(group, dataclasses.replace(ctx, engine=Watched(ctx.engine)))
"""


def trained(sample):
    """Every answer that trains in a sample: ids before it, its ids, log-probs and versions."""
    start, found = sample.prompt_length, []
    for on, places in groupby(range(sample.response_length), key=lambda place: sample.loss_mask[place]):
        first, *rest = places
        last = (rest or [first])[-1] + 1
        if on:
            parts = (sample.response_tokens, sample.rollout_log_probs, sample.weight_versions)
            found.append((sample.tokens[: start + first], *(part[first:last] for part in parts)))
    return found


def steps_of(run):
    """The samples of every step."""

    async def read():
        ledger = SqliteLedger(run)
        try:
            found = []
            while names := await ledger.composition(len(found) + 1):
                found.append(await ledger.samples(names))
            return found
        finally:
            await ledger.close()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def run(train, length, tmp_path_factory):
    """The run's folder, its metrics of GRPO's steps, their samples, and what the engine has seen of them."""
    folder = tmp_path_factory.mktemp("witness")
    (folder / "witness.py").write_text(WITNESS)
    task = {"name": "stones", "prompt_data": f"{HERE / 'rows.jsonl'}@[0:432]"}
    task |= {"generate": f"{folder / 'witness.py'}:generate", "reward": f"{HERE / 'agents.py'}:reward"}
    tasks = ", ".join(f"{name} = {json.dumps(value)}" for name, value in task.items())
    seen = {"AGENTS": str(HERE / "agents.py"), "SEEN": str(folder / "seen.jsonl")}
    run_dir = train(HERE / "recipe.toml", f"data.tasks=[{{{tasks}}}]", *(SHORT if length == "short" else ()), **seen)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {row["version"]: row["metrics"] for row in rows if row["kind"] == "step" and row["stage"] == "grpo"}
    samples = [sample for version, step in enumerate(steps_of(run_dir), 1) if version in steps for sample in step]
    return run_dir, steps, samples, [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


@pytest.mark.system
def test_every_token_of_the_engine_trains_once_with_its_log_prob_after_what_the_engine_read(run):
    _, steps, samples, seen = run
    assert all(metrics["ledger/dropped"] == 0 for metrics in steps.values())
    assert Counter(json.dumps(answer) for sample in samples for answer in trained(sample)) == Counter(
        json.dumps(answer) for answer in seen
    )


@pytest.mark.system
def test_the_trainer_gives_the_tokens_the_log_probs_that_the_engine_gave_them(run):
    _, steps, _, _ = run
    assert all(metrics["train_rollout_logprob_abs_diff"] < 1e-5 for metrics in steps.values())


@pytest.mark.system
@pytest.mark.nightly
@pytest.mark.parametrize("length", ["whole"], indirect=True)
def test_the_answers_become_better(run, scores):
    before, after = scores(run[0], "held_out")
    assert before < 0.65, "the warm-up imitates one who errs"
    assert after >= 0.65


@pytest.mark.system
def test_tries_and_summaries_are_branches_of_one_rollout(run):
    _, _, samples, _ = run
    rollouts: dict[int, list] = {}
    for sample in samples:
        rollouts.setdefault(sample.rollout_id, []).append(sample)
    kinds = Counter()
    for branches in rollouts.values():
        facts = branches[0].metadata["chat"]
        assert sorted(branch.metadata["chat"]["branch"] for branch in branches) == list(range(facts["branches"]))
        assert (facts["forks"], facts["rewritten"]) == (1, 0)
        assert facts["branches"] == facts["roots"] + 1
        first, second, *rest = sorted(branches, key=lambda branch: branch.metadata["chat"]["branch"])
        assert second.tokens[: second.prompt_length] == first.tokens[: second.prompt_length]
        tried = [branch.metadata["chat"]["answer"] for branch in (first, second)]
        assert len(rest) == (tried[0] != tried[1])
        assert branches[0].metadata["said"] == (rest or [first])[0].metadata["chat"]["answer"].strip()
        kinds[len(branches)] += 1
    assert set(kinds) - {2} == {3}, "two answers that agree need no summary"
