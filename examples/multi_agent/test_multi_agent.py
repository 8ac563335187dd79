"""The team's parts do what the page says, a frozen agent among them, and the recipe trains; nightly: it learns."""

import asyncio
import json
from pathlib import Path

import pytest

from slime_core import Context, Group, Prompt, Sample, SamplingParams
from slime_core.config.schema import Config
from slime_core.plugins.locate import locate
from slime_core.testing.fakes import FakeEngine
from slime_core.testing.models import VOCAB, char_tokenizer

HERE = Path(__file__).parent
ROLES = ["solver", "solver", "solver", "rewriter", "rewriter", "selector"]


def part(name):
    """A function of the example, as a run finds it."""
    return locate(f"{HERE / 'team.py'}:{name}", name)


def played(engines, **more):
    """Two teams' group on engines that draw at random."""
    tokenizer = char_tokenizer(VOCAB + "/RS")
    made = {role: FakeEngine(vocab_size=len(tokenizer), stop_token=1) for role in ("policy", *engines)}
    for number, engine in enumerate(made.values()):
        engine.version = 5 + number
    ctx = Context(
        config=Config(),
        engine=made.pop("policy"),
        engines=made,
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=4),
        **more,
    )
    tokens = tokenizer.encode("7+8=", add_special_tokens=False)
    prompt = Prompt(id="main/0", prompt="7+8=", tokens=tokens, label="51")
    samples = [Sample(id=f"main/0-{n}", prompt="7+8=", tokens=list(tokens), label="51", rollout_id=n) for n in (0, 1)]
    group = Group(prompt=prompt, samples=samples, rollouts={0: [0], 1: [1]})
    return asyncio.run(part("generate")(group, ctx)), ctx


def evaluations(run):
    """The metrics of the run's two evaluations."""
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"] for row in rows if row.get("name") == "heldout"]


def test_a_short_run_evaluates_the_team_and_its_solver_after_each_stage(train):
    flags = ("stage.warmup.num_rollout=4", "stage.grpo.num_rollout=2", "stage.grpo.rollout_batch_size=8")
    evaluated = evaluations(train(HERE / "recipe.toml", *flags))
    assert [metrics["pass@1"] for metrics in evaluated] == [metrics["reward/mean"] for metrics in evaluated]
    assert [0 <= metrics["reward/solver/mean"] <= 1 for metrics in evaluated] == [True, True]


@pytest.mark.nightly
def test_the_team_learns_and_is_better_than_its_solver(train):
    warm, end = evaluations(train(HERE / "recipe.toml"))
    assert end["reward/mean"] >= warm["reward/mean"] + 0.06
    assert end["reward/mean"] >= end["reward/solver/mean"] + 0.05
    assert end["reward/mean"] >= warm["reward/solver/mean"] + 0.2


def test_every_agent_of_a_team_has_a_sample_and_reads_what_the_others_said():
    group, ctx = played([])
    teams = [[group.samples[place] for place in places] for places in group.rollouts.values()]
    assert [[sample.role for sample in team] for team in teams] == [ROLES, ROLES]
    assert len({sample.id for sample in group.samples}) == 12
    for team in teams:
        assert {tuple(sample.loss_mask) for sample in team} <= {(1,) * n for n in range(1, 5)}
        said = [sample.response.strip() for sample in team]
        assert ctx.tokenizer.decode(team[3].tokens[: team[3].prompt_length]) == f"R7+8=/{'/'.join(said[:3])}="
        assert team[5].prompt == f"S7+8=/{'/'.join(said[3:5])}="
    assert teams[0][0].tokens != teams[1][0].tokens


def test_a_frozen_agent_speaks_and_does_not_learn():
    group, _ = played(["rewriter"])
    for sample in group.samples:
        frozen = sample.role == "rewriter"
        assert sample.model == ("rewriter" if frozen else "")
        assert set(sample.loss_mask) == {0 if frozen else 1}
        assert set(sample.weight_versions) == {-1 if frozen else 5}


@pytest.mark.parametrize(("evaluation", "values"), [(False, [0.12, 0, 1.2, 0, 0.08]), (True, [1, 1, 1, 0, 0])])
def test_a_right_answer_is_worth_more_where_the_team_is_right(evaluation, values):
    answers = [("solver", "51"), ("solver", "52"), ("selector", "51"), ("selector", "52"), ("solver", "51")]
    samples = [Sample(role=role, label="51", metadata={"extracted_answer": said}) for role, said in answers]
    group = Group(prompt=Prompt(id="main/0"), samples=samples, rollouts={0: [0, 1, 2], 1: [4, 3]})
    rewards = part("reward")(group, Context(config=Config(), evaluation=evaluation))
    assert [reward.value for reward in rewards] == pytest.approx(values)
    assert [reward.terms for reward in rewards[1:3]] == [{"solver": 0.0}, {"selector": 1.0}]


@pytest.mark.parametrize(
    ("judgment", "chosen"),
    [("2", 1), ("1 is wrong. Judgment: 2", 1), ("Judgment: 3", None), ("0", None), ("none", None)],
)
def test_the_last_number_chooses(judgment, chosen):
    assert part("choice")(judgment, 2) == chosen
