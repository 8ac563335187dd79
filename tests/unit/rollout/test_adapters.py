"""Which adapter a sample is of: its task's, what a rollout function says, and nothing that the run does not have."""

import asyncio

import pytest

from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.config.sections.data import DataSection, DataTask
from slime_core.config.sections.lora import lora_conflicts
from slime_core.config.sections.rollout import RolloutSection
from slime_core.config.sections.train import TrainSection
from slime_core.context import Context
from slime_core.errors import ConfigError, EngineError
from slime_core.rollout.groups import check_group, issued_adapters, issued_ids, pending_group, sibling
from slime_core.testing.fakes import CharTokenizer, ScriptedEngine
from slime_core.types import Prompt, SamplingParams

pytestmark = pytest.mark.unit
TASKS = (DataTask(name="sums"), DataTask(name="reviews", adapter="critic"))
TWO = Config(
    train=TrainSection(lora_rank=4, lora_sync="adapter", lora_adapters=("solver", "critic")), data=DataSection(tasks=TASKS)
)  # fmt: skip


def issued(task="sums", config=TWO, **more):
    return pending_group(Prompt(id="main/0", task=task, prompt="1+2=", tokens=[2, 11, 3, 13]), config, count=2, **more)


def checked(group, config=TWO):
    names = issued_adapters(group, config)
    ids = issued_ids(group)
    for sample in group.samples:
        sample.append_response([4], [-0.5], version=0)
    check_group(group, ids, 16, adapters=names)


def test_a_sample_is_of_its_tasks_adapter_or_the_first():
    assert [sample.model for sample in issued().samples] == ["solver", "solver"]
    assert [sample.model for sample in issued("reviews").samples] == ["critic", "critic"]
    assert issued(adapter="critic").samples[0].model == "critic", "an evaluation set's own"
    assert issued(config=Config()).samples[0].model == "", "without adapters nothing is named"
    assert sibling(issued("reviews").samples[0], 1).model == "critic"


def test_a_rollout_function_generates_with_the_adapter_that_it_names():
    engine = ScriptedEngine(lambda request: ([4], "stop"), vocab_size=16)
    ctx = Context(config=TWO, engine=engine, tokenizer=CharTokenizer(), sampling=SamplingParams(max_new_tokens=2))
    first, second = issued().samples
    second.model = "critic"

    async def play():
        await ctx.generate(first)
        await ctx.generate(second)
        scored = []

        async def score(tokens, start, media=None, adapter=""):
            scored.append(adapter)

        engine.score = score
        await ctx.score(engine, second, 1)
        assert scored == ["critic"]
        second.model = "crtic"
        with pytest.raises(EngineError) as failure:
            await ctx.generate(second)
        return failure.value

    error = asyncio.run(play())
    assert [request.adapter for request in engine.requests] == ["solver", "critic"]
    assert (error.code, error.where) == ("ENG09", "sample main/0-1")
    assert ("solver, critic" in error.why, error.fix) == (True, "did you mean 'critic'?")


def test_an_engine_of_another_model_is_asked_for_no_adapter():
    frozen = ScriptedEngine(lambda request: ([4], "stop"), vocab_size=16)
    sampling = SamplingParams(max_new_tokens=2)
    ctx = Context(config=TWO, engine=frozen, engines={"judge": frozen}, sampling=sampling)
    asyncio.run(ctx.generate(issued().samples[0]))
    assert frozen.requests[0].adapter == ""


@pytest.mark.parametrize(("sync", "debug"), [("merged", False), ("adapter", True)])
def test_an_engine_that_gets_no_adapters_is_asked_for_none(sync, debug):
    engine = ScriptedEngine(lambda request: ([4], "stop"), vocab_size=16)
    train = TrainSection(lora_rank=4, lora_sync=sync, lora_adapters=("solver",))
    config = Config(train=train, rollout=RolloutSection(debug_rollout_only=debug))
    ctx = Context(config=config, engine=engine, tokenizer=CharTokenizer(), sampling=SamplingParams(max_new_tokens=2))
    asyncio.run(ctx.generate(issued(config=config).samples[0]))
    assert engine.requests[0].adapter == ""


def test_tokens_that_train_are_of_an_adapter_of_the_run():
    group = issued("reviews")
    group.samples[1].model = ""  # as of a sample that a function makes anew
    checked(group)
    assert [sample.model for sample in group.samples] == ["critic", "critic"]
    group = issued()
    group.samples[1].model, group.samples[1].remove_sample = "judge", True  # a frozen model's, which does not learn
    checked(group)
    group = issued()
    group.samples[1].model = "judge"
    with pytest.raises(EngineError, match="no adapter 'judge'"):
        checked(group)


def test_a_task_names_an_adapter_that_the_run_has(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[rollout]\nhf_checkpoint = "."\n[train]\nlora_rank = 4\nlora_adapters = ["solver", "critic"]\n'
        'lora_sync = "adapter"\n[[data.tasks]]\nname = "sums"\nadapter = "slover"\nprompt_data = "x.jsonl"\n'
        '[[eval.eval_tasks]]\nname = "held"\nadapter = "writer"\nprompt_data = "x.jsonl"\n'
    )
    (tmp_path / "x.jsonl").write_text('{"input": "1+2="}\n')
    with pytest.raises(ConfigError) as failure:
        load_config(recipe)
    text = str(failure.value)
    assert "task 'sums' names the adapter 'slover'" in text
    assert "did you mean 'solver'?" in text
    assert "task 'held' names the adapter 'writer'" in text
    assert "train.lora_adapters names solver, critic" in text


@pytest.mark.parametrize(
    ("names", "more", "problem"),
    [
        (["a", "a"], {}, "two adapters are named 'a'"),
        (["a.b"], {}, "a name is 1 to 64 letters, digits, _ and -"),
        (["a-1-of-2"], {}, "files of checkpoints have such an end where several ranks wrote them"),
        (["a", "b"], {"lora_export": "merged"}, "a model has one adapter merged, and none of them is the run's own"),
        (["base"], {}, "engines compute without any adapter under this name"),
        (["reward"], {}, "its metrics would be named reward/..., as others of a run are"),
        (["a", "b"], {"lora_sync": "merged"}, "weights with one adapter merged are not those of another"),
        (["a", "b"], {"advantage_estimator": "ppo"}, "one critic would learn from the samples of all"),
        (["a", "b"], {"routing_replay": "policy"}, "recorded experts are those of one adapter's batch at a time"),
    ],
    ids=["twice", "characters", "of ranks", "merged at the end", "base", "taken", "merged", "critic", "routing"],
)
def test_names_of_adapters_and_what_several_cannot_have(names, more, problem):
    section = TrainSection(**{"lora_rank": 4, "lora_sync": "adapter", "lora_adapters": tuple(names), **more})
    problems = list(lora_conflicts(section))
    assert [problem in f"{one.what} {one.why}" for one in problems] == [True]
    assert not list(lora_conflicts(TrainSection(lora_rank=4, lora_sync="adapter", lora_adapters=("a", "b"))))
