"""Entries, scorers, sides and levels, with reasoning_gym as it was released."""

import asyncio
import json

import pytest

from slime_core import Context, Status
from slime_core.config.schema import Config
from slime_core.errors import DataError
from slime_core.testing.plugins import check_plugin
from slime_core.types import Sample
from slime_reasoning_gym import plugin
from slime_reasoning_gym.answers import answer_in
from slime_reasoning_gym.curriculum import Curriculum
from slime_reasoning_gym.options import Options
from slime_reasoning_gym.plugin import slime_prompts
from slime_reasoning_gym.rows import TrainingRows
from slime_reasoning_gym.tasks import problems_of, task_of
from slime_reasoning_gym.worker import LITERAL_READERS
from slime_reasoning_gym.workers import WorkerError, Workers

pytestmark = pytest.mark.integration

SYMBOLIC = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Tasks whose scorers hand the answer to sympy."""
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}  # entries have no answer


@pytest.fixture(scope="module")
def workers():
    pool = Workers(1)
    yield pool
    pool.close()


@pytest.fixture
def ctx():
    def make(*, evaluation=False, stage="grpo", **options):
        return Context(config=Config(), options=Options(**options), evaluation=evaluation, stage=stage)

    yield make
    plugin.slime_run_done(make())


def test_the_plugin_keeps_its_contract():
    assert [finding for finding in check_plugin("reasoning_gym") if finding.status in ("fail", "warn")] == []


def test_an_entry_is_a_function_of_its_address_in_every_process(workers, ctx):
    """Five of the tasks iterate over sets of strings, whose order differs from process to process."""
    other = Workers(1)
    for name in ("isomorphic_strings", "list_functions", "ransom_note", "polynomial_multiplication", "word_ladder"):
        address = task_of(name, Options(), workers).address(seed=7, index=3, level=None)
        assert workers.ask("entry", **address) == other.ask("entry", **address)
    other.close()
    rows, again = (slime_prompts("chain_sum", ctx()) for _ in range(2))
    assert [rows.at(i) for i in (0, 499, 500, 12_345)] == [again.at(i) for i in (0, 499, 500, 12_345)]
    assert rows.at(0).prompt != slime_prompts("chain_sum", ctx(stage="other")).at(0).prompt


def test_rows_are_made_while_the_event_loop_continues_and_keep_the_level_of_the_call(ctx):
    """The only worker is taken, as by an entry that needs minutes; success moves the level meanwhile."""
    pool, options = Workers(1), Options(curriculum=True, level_groups=1)
    task = task_of("gcd", options, pool)

    def rows():
        levels = Curriculum().open("grpo", "gcd", start=1, top=task.top)
        return TrainingRows(task, options, ctx(curriculum=True), pool, levels), levels

    async def prepare():
        source, levels = rows()
        with pool._free:
            preparing = asyncio.create_task(source.prepare(range(4)))
            for _ in range(10):
                await asyncio.sleep(0)
            levels.rewards.append(1.0)
            assert levels.move(options) == 1.0
            assert not preparing.done()
        await preparing
        pool.close()
        assert sorted(source._prepared) == [(position, 1) for position in range(4)]
        return [source.at(position) for position in range(6)]

    made = asyncio.run(prepare())
    assert [prompt.metadata["reasoning_gym"]["level"] for prompt in made] == [1, 1, 1, 1, 2, 2]
    again, _ = rows()
    assert made[:4] == [again.at(position) for position in range(4)]
    pool.close()


def test_closing_ends_busy_and_starting_workers_and_fails_the_requests_that_wait():
    pool = Workers(1)
    address = task_of("jugs", Options(), pool).address(seed=1, index=0, level=pool.describe()["levels"]["jugs"])

    async def close_under(do, requests, **address):
        asking = [asyncio.create_task(asyncio.to_thread(pool.ask, do, **address)) for _ in range(requests)]
        while not (pool._busy and len(pool._free._cond._waiters) == requests - 1):
            await asyncio.sleep(0)
        worker = pool._busy[0]
        pool.close()
        errors = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(error, WorkerError) for error in errors), errors
        assert sorted(map(str, errors)) == ["its process ended", *["the workers were closed"] * (requests - 1)]
        assert worker.process.poll() is not None
        assert pool._busy == pool._idle == []

    asyncio.run(close_under("entry", 1, **address))
    asyncio.run(close_under("describe", 3))  # its worker still imports reasoning_gym
    assert pool.ask("describe")["levels"]
    pool.close()


def test_no_question_of_a_small_task_is_on_both_sides(ctx):
    options = {"heldout": 0.3, "parameters": {"chain_sum": {"min_terms": 1, "max_terms": 1, "max_digits": 1}}}
    training, heldout = (
        slime_prompts("chain_sum", ctx(**options)),
        slime_prompts("chain_sum", ctx(evaluation=True, **options)),
    )
    asked = [heldout.at(i) for i in range(len(heldout))]
    trained = {training.at(i).prompt for i in range(200)}
    questions = {prompt.prompt for prompt in asked}
    assert len(questions) == len(asked) > 0
    assert not trained & questions
    assert len(trained | questions) == 10
    assert {prompt.label for prompt in asked}.isdisjoint(training.at(i).label for i in range(200))
    with pytest.raises(DataError, match="too few questions"):
        slime_prompts("chain_sum", ctx(**{**options, "heldout": 0.999})).at(0)


def test_an_answer_runs_no_code_and_one_that_hangs_or_breaks_a_scorer_costs_itself_alone(workers, ctx, tmp_path):
    canary = tmp_path / "canary"
    code = f"__import__('pathlib').Path('{canary}').touch()"
    for name in (*LITERAL_READERS, *SYMBOLIC):
        address = task_of(name, Options(), workers).address(seed=1, index=0, level=None)
        for hostile in (code, f"[{code}]", f"[[{code}]]", "x.__class__", "preview(x)", "9**9**9"):
            assert workers.score(hostile, 60.0, **address) < 0.5
        if name != "puzzle24":
            answer = workers.ask("entry", **address)["answer"]
            assert workers.score(answer, 60.0, **address) == 1.0
    assert not canary.exists()

    def score(task, answer, **options):
        prompt = slime_prompts(task, ctx()).at(0)
        sample = Sample(id="a", task=task, response=f"<answer>{answer}</answer>", metadata=dict(prompt.metadata))
        sample.status = Status.COMPLETED
        plugin.slime_sample_done(sample, ctx())
        return plugin.score(sample, ctx(**options)), prompt.label

    reward, label = score("chain_sum", "1e")
    assert (reward.kind, reward.value) == ("score", 0.0)
    reward, _ = score("chain_sum", label)
    assert (reward.kind, reward.value, reward.terms) == ("score", 1.0, {"score": 1.0, "format": 1.0})
    reward, _ = score("prime_factorization", "zzz")
    assert (reward.kind, reward.value) == ("failed", 0.0)
    reward, _ = score("countdown", "((9**999)**999)**999", score_seconds=1.0)
    assert reward.kind == "infra_error"
    assert "no result in 1 s" in reward.reason
    reward, _ = score("chain_sum", label)
    assert reward.value == 1.0


@pytest.mark.parametrize(
    ("response", "where", "answer"),
    [
        ("<answer>1</answer> no, <answer>\n 2 </answer>", "tag", "2"),
        ("<answer> <answer>3</answer>", "tag", "3"),
        ("4", "tag", None),
        (r"so \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        ("one\n two \n", "last_line", "two"),
        ("3 + 4 = -1,007.50.", "number", "-1,007.50"),
        ("12-5", "number", "5"),
        ("none", "number", None),
        (" 5 ", "response", "5"),
        (" ", "response", None),
    ],
)
def test_where_an_answer_is(response, where, answer):
    assert answer_in(response, where) == answer


def test_levels_follow_success_and_a_row_keeps_its_level():
    options = Options(curriculum=True, level_groups=4, level_up=0.75, level_down=0.25)
    curriculum = Curriculum()
    levels = curriculum.open("grpo", "gcd", start=9, top=1)
    assert [levels.at(i) for i in range(6)] == [1] * 6  # not above the top
    levels.rewards += [0.0, 0.0, 1.0]
    assert levels.move(options) is None  # too few groups
    levels.rewards += [0.0]
    assert levels.move(options) == 0.25
    assert [levels.at(i) for i in (2, 5, 6, 7)] == [1, 1, 0, 0]
    levels.rewards += [0.0] * 4
    assert levels.move(options) is None  # not below 0
    resumed = Curriculum()
    resumed.load(json.loads(json.dumps(curriculum.state())))
    again = resumed.open("grpo", "gcd", start=0, top=1)
    assert again == levels
    for each in (levels, again):
        each.rewards += [1.0, 1.0, 1.0, 0.0]
        assert each.move(options) == 0.75
        assert [each.at(i) for i in (5, 7, 8)] == [1, 0, 1]


def test_every_wrong_setting_is_named_with_its_key_and_the_nearest_name(cli, recipe, model):
    path = recipe(
        f"""
        plugins = ["reasoning_gym"]
        [rollout]
        hf_checkpoint = "{model}"
        [data]
        tasks = ["chian_sum", "chain_sum.99", "acre.0", "gcd:2", "lcm.1", "products"]
        [eval]
        eval_tasks = ["nothing_like_it"]
        [plugin.reasoning_gym.parameters.gcd]
        min_valu = 3
        [plugin.reasoning_gym.parameters.lcm]
        max_numbers = 2
        [plugin.reasoning_gym.parameters.products]
        min_terms = 5
        max_terms = 2
        [plugin.reasoning_gym.parameters.prodcts]
        """
    )
    done = cli("run", path, "--dry-run")
    assert done.code == 2
    for text in (
        "no task 'chian_sum' (recipe.toml:6)",
        "did you mean 'chain_sum'?",
        "levels 0 to 10",
        "task 'acre' has no level 0",
        "task 'gcd' has no parameter 'min_valu' (recipe.toml:10)",
        "did you mean 'min_value'?",
        "parameter 'max_numbers' of task 'lcm' is set by its level",
        "task 'products' refuses its parameters: max_terms must be >= min_terms",
        "no task 'nothing_like_it' (recipe.toml:8)",
        "no task 'prodcts'",
    ):
        assert text in done.err
    flags = ("--plugin", "reasoning_gym", "--tasks", "gcd:2,lcm", "--eval-tasks", "gcd.1", "--heldout-rows", "2")
    flags += ("--hf-checkpoint", model, "--no-apply-chat-template", "--dry-run", "--system-prompt", "")
    assert "overlong" in cli("run", *flags).err  # the recipe's responses leave no room in this model's context
    done = cli("run", *flags, "--rollout-max-response-len", "8")
    assert done.code == 0, done.err


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_task_makes_rows_and_scores_its_own_answer(tmp_path):
    """At its defaults and at the ends of its curriculum; no answer runs code."""
    workers, canary = Workers(1), tmp_path / "canary"
    code = f"__import__('pathlib').Path('{canary}').touch()"
    tops = workers.describe()["levels"]
    slow = {("jugs", tops["jugs"]), ("sokoban", 0), ("zebra_puzzles", tops["zebra_puzzles"])}  # minutes an entry
    for name, top in tops.items():
        for level in [None] if top is None else [None, *sorted({0, top})]:
            task = task_of(name if level is None else f"{name}.{level}", Options(), workers)
            assert list(problems_of(task, Options(), workers, ())) == []
            for index in range(0 if (name, level) in slow else 2):
                address = task.address(seed=5, index=index, level=level)
                entry = workers.ask("entry", **address)
                assert entry["question"]
                assert (entry["answer"] is None) == (name in UNANSWERED), name
                if name not in UNANSWERED:
                    assert workers.score(entry["answer"], 60.0, **address) == 1.0, (name, level)
                for hostile in (code, f"[{code}]") if name != "prime_factorization" else ():
                    workers.score(hostile, 60.0, **address)
    workers.close()
    assert not canary.exists()
