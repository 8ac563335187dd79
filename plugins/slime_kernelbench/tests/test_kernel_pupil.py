"""The careless pupil: how often he slips and mends, and that his dialogues are, id by id, those of a run."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pytest

import slime_kernelbench
from slime_core import ConfigError, Context, Group, Prompt, Sample, SamplingParams
from slime_core.config.load import load_config, stages
from slime_core.testing.fakes import ScriptedEngine
from slime_kernelbench.options import Options
from slime_kernelbench.run import KernelbenchRun, prompts
from slime_kernelbench.warmup.family import NONE, Operator, Slips
from slime_kernelbench.warmup.pupil import fenced, mended, random_slips, verdict
from slime_kernelbench.warmup.rows import Family
from slime_kernelbench.warmup.tasks import HELDOUT, PUPIL, TRAIN

pytestmark = pytest.mark.integration

PACKAGE = Path(slime_kernelbench.__file__).parent
RECIPE = PACKAGE / "recipes" / "default.toml"
OPERATOR = Operator(("halve", "tanh"), "softmax")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGE / "model")


@pytest.fixture
def ctx(tokenizer):
    """As the recipe's first stage has it."""
    return context_of(RECIPE, tokenizer)


def context_of(recipe, tokenizer):
    config = stages(load_config(recipe, []))[0]
    options = Options(**config.plugin["kernelbench"], judge_workers=1)
    sampling = SamplingParams(max_new_tokens=config.rollout.rollout_max_response_len)
    return Context(config=config, options=options, tokenizer=tokenizer, sampling=sampling)


def test_each_place_slips_and_mends_as_often_as_the_habits_say():
    rng = Random(3)
    first = [asdict(random_slips(OPERATOR, 0.6, rng)) for _ in range(3000)]
    for name in OPERATOR.slips:
        assert sum(slips[name] for slips in first) / 3000 == pytest.approx(0.6, abs=0.03)
    later = [asdict(mended(Slips(load=True, fill=True), 0.25, rng)) for _ in range(3000)]
    assert sum(slips["load"] for slips in later) / 3000 == pytest.approx(0.75, abs=0.03)
    assert not any(slips["store"] or slips["divide"] for slips in later)  # mending makes no new slip
    assert random_slips(Operator(("tanh",), "sum"), 1.0, rng) == Slips(load=True, fill=True)


def test_a_row_is_a_turn_whose_answer_has_no_slip_that_the_one_before_had_not(ctx, tokenizer):
    rows = prompts(PUPIL, ctx)
    found = [rows.at(position) for position in range(300)]
    assert found == [rows.at(position) for position in range(300)]
    later = [row for row in found if row.tokens]
    assert 0.1 < len(later) / 300 < 0.3
    for row in later:
        question, answer, end = tokenizer.decode(row.tokens).split("<assistant>")
        before, told = answer.split("<eos><user>")
        assert (question.startswith("<user>ROWS = "), end) == (True, "")
        assert told in ("wrong: values", "wrong: nan")
        assert row.label.count(" + r + c") <= before.count(" + r + c")
    for row in found:
        assert row.label.startswith("```python\nimport torch")
        assert row.label.endswith("        return y\n```")


def test_no_stage_shows_a_held_out_operator_or_shape(ctx):
    heldout, train = prompts(HELDOUT, ctx), prompts(TRAIN, ctx)
    asked = {problem.name for problem in heldout.problems}
    assert len(asked) == ctx.options.family_heldout
    assert not asked & {problem.name for problem in train.problems}
    rows = prompts(PUPIL, ctx)
    told = [rows.at(position).prompt[0]["content"] for position in range(500)]
    shapes = {line for text in told for line in text.splitlines()[:2]}
    for problem in heldout.problems:
        question = heldout.at(heldout.problems.index(problem)).prompt[0]["content"].splitlines()
        assert not shapes & set(question[:2])
        assert not any("\n".join(question[2:]) in text for text in told)


@pytest.mark.parametrize("recipe", ["default", "tritonforge"])
def test_the_pupils_dialogue_is_the_one_that_a_run_has_before_the_real_judge(recipe, tokenizer):
    ctx = context_of(RECIPE.with_stem(recipe), tokenizer)
    ctx = replace(ctx, options=ctx.options.model_copy(update={"max_turns": 2}))
    wrong, right = (fenced(OPERATOR.kernel(slips)) for slips in (Slips(load=True), NONE))
    problem = OPERATOR.problem(3, 21)
    said = iter((wrong, right))

    def say(request):
        return [*tokenizer.encode(next(said), add_special_tokens=False), tokenizer.eos_token_id], "stop"

    async def play():
        run, engine = KernelbenchRun(), ScriptedEngine(say, vocab_size=len(tokenizer))
        asked = prompts(PUPIL, ctx)._voice.ask(problem)
        tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(id="grpo/0", prompt=asked, tokens=tokens, metadata={"problem": asdict(problem)})
        sample = Sample(id="grpo/0-0", prompt=asked, tokens=list(tokens), metadata=dict(prompt.metadata), rollout_id=0)
        group = Group(prompt=prompt, samples=[sample], rollouts={0: [0]})
        try:
            return await run.generate(group, replace(ctx, engine=engine)), engine
        finally:
            await run.aclose()

    group, engine = asyncio.run(play())
    statuses = [sample.metadata["kernelbench"]["verdict"]["status"] for sample in group.samples]
    assert statuses == ["wrong", "correct"]
    assert group.samples[1].metadata["kernelbench"]["source"] == OPERATOR.kernel()
    voice = prompts(PUPIL, ctx)._voice
    kinds = {d.kind: v for v in (verdict(problem, Random(n)) for n in range(20)) for d in v.diagnostics}
    source = OPERATOR.kernel(Slips(load=True))
    assert engine.requests[1].tokens == voice.again(voice.ask(problem), source, kinds["values"])


def test_the_recipe_warms_up_on_the_pupil_and_then_trains_on_the_judge():
    warmup, grpo = stages(load_config(RECIPE, []))
    assert [task.name for task in warmup.data.tasks] == [PUPIL]
    assert warmup.train.loss_type == "sft_loss"
    assert [task.name for task in grpo.data.tasks] == [TRAIN]
    assert grpo.train.advantage_estimator == "turn_grpo"
    assert [task.name for task in grpo.eval.eval_tasks] == [HELDOUT]
    assert Options(**grpo.plugin["kernelbench"]).max_turns == 3
    assert grpo.plugin["kernelbench"]["heldout"] == 0.15  # as the tokenizer was made


def test_an_unknown_task_of_the_family_is_an_error_that_names_the_tasks(ctx):
    with pytest.raises(ConfigError, match="kernelbench_family_pupils") as error:
        prompts("kernelbench_family_pupils", ctx)
    assert all(task in error.value.fix for task in (TRAIN, PUPIL, HELDOUT))


def test_a_training_problem_is_right_by_its_own_kernel_text():
    for problem in Family(heldout=0.15, seed=0).problems("train", 5):
        *steps, finish = problem.name.split("_")
        assert Operator(tuple(steps), finish).problem(*map(int, problem.id.split("/")[-1].split("x"))) == problem
