"""Order, epochs, tasks, resume, plugins' prompts and evaluation sets."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from stand_ins import NoPlugins

from slime_core.config.schema import Config
from slime_core.config.sections.evaluation import EvalSection, EvalTask
from slime_core.context import Context
from slime_core.data.opening import eval_sets
from slime_core.errors import DataError, PluginError
from slime_core.rollout.groups import pending_group
from slime_core.types import Prompt

pytestmark = pytest.mark.unit


def texts(prompts):
    return [p.prompt for p in prompts]


@pytest.fixture
def twenty(write):
    return write(*({"input": f"{i:02d}", "label": i} for i in range(20)))


def test_prompts_come_numbered_with_tokens_label_and_place(write, source):
    path = write({"q": "1+2=", "a": "3", "metadata": {"level": 2}, "extra": 1})
    (prompt,) = source(path, input_key="q", label_key="a", stage="warmup").next(1)
    assert prompt == Prompt(
        id="warmup/0",
        task="default",
        position=0,
        prompt="1+2=",
        tokens=[4, 13, 5, 17],
        label="3",
        metadata={"row_id": "rows.jsonl:1", "level": 2},
        where=f"{path}:1",
    )


def test_text_is_of_the_first_rows_and_nothing_is_drawn_for_it(write, source):
    path = write({"input": "1+2="}, {"input": "7" * 40}, {"input": "8-"}, {"input": "9"})
    rows = source(path, rollout_max_prompt_len=10, rollout_shuffle=True)
    before = rows.state()
    assert rows.text(6) == [4, 13, 5, 17, 11, 14]
    assert rows.text(100) == [4, 13, 5, 17, 11, 14, 12]  # all there is; the long row is dropped
    assert rows.state() == before
    assert rows.counts()["read"] == 0


def test_text_of_several_tasks_has_of_each(write, source):
    one, two = write(*[{"input": "1"}] * 9, name="one.jsonl"), write(*[{"input": "2"}] * 9, name="two.jsonl")
    tasks = ({"name": "a", "prompt_data": str(one)}, {"name": "b", "prompt_data": str(two)})
    assert source(tasks=tasks).text(6) == [4, 4, 4, 5, 5, 5]


def test_without_shuffling_rows_keep_their_order_in_every_epoch(twenty, source):
    assert texts(source(twenty).next(45)) == [f"{i % 20:02d}" for i in range(45)]


def test_shuffling_gives_every_epoch_its_own_order_of_all_rows(twenty, source):
    prompts = texts(source(twenty, rollout_shuffle=True).next(60))
    epochs = [prompts[:20], prompts[20:40], prompts[40:]]
    assert all(sorted(epoch) == [f"{i:02d}" for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_a_function_of_seed_and_stage(twenty, source):
    def order(**kwargs):
        return texts(source(twenty, rollout_shuffle=True, **kwargs).next(20))

    assert order() == order()
    assert len({tuple(order(seed=s, stage=t)) for s in (0, 1) for t in ("a", "b")}) == 4


@pytest.mark.parametrize("steps", [[7, 13, 30], [1] * 50, [50]], ids=["uneven", "one by one", "at once"])
def test_the_order_does_not_depend_on_how_many_prompts_are_taken_at_once(twenty, source, steps):
    found = source(twenty, rollout_shuffle=True)
    assert texts(p for count in steps for p in found.next(count)) == texts(
        source(twenty, rollout_shuffle=True).next(50)
    )


@pytest.mark.parametrize("after", [0, 1, 19, 20, 33])
def test_a_restored_source_goes_on_as_the_saved_one_does(write, source, after):
    one = write(*({"input": "1" * (1 + i % 5)} for i in range(12)), name="one.jsonl")
    two = write(*({"input": "2" * (1 + i % 3)} for i in range(5)), name="two.jsonl")
    tasks = (
        {"name": "one", "prompt_data": str(one), "weight": 2.0},
        {"name": "two", "prompt_data": str(two), "weight": 1.0},
    )

    def fresh():
        return source(tasks=tasks, rollout_shuffle=True, rollout_max_prompt_len=4)

    first = fresh()
    first.next(after)
    state = json.loads(json.dumps(first.state()))
    again = fresh()
    again.restore(state)
    assert again.counts() == first.counts()
    assert again.next(40) == first.next(40)
    assert again.state() == first.state()


def test_rows_that_changed_since_the_save_are_refused_with_both_hashes(twenty, source, refused):
    found = source(twenty)
    state = found.state()
    twenty.write_text(twenty.read_text().replace("07", "77"))
    changed = source(twenty)
    error = refused("DAT29", changed.restore, state)
    mark = changed.state()["tasks"]["default"]["fingerprint"]
    assert state["tasks"]["default"]["fingerprint"] in error.why
    assert mark in error.why


def test_another_seed_or_other_tasks_are_refused(twenty, source, refused):
    state = source(twenty).state()
    refused("DAT29", source(twenty, seed=1).restore, state)
    refused("DAT29", source(tasks=({"name": "other", "prompt_data": str(twenty)},)).restore, state)


def test_tasks_share_positions_by_their_weights_and_have_their_own_keys(write, source):
    one = write({"q": "1", "a": "x"}, name="one.jsonl")
    two = write({"text": "2"}, name="two.jsonl")
    tasks = (
        {"name": "one", "prompt_data": str(one), "weight": 3.0, "input_key": "q", "label_key": "a"},
        {"name": "two", "prompt_data": str(two), "input_key": "text"},
    )
    prompts = source(tasks=tasks).next(800)
    assert [p.position for p in prompts] == list(range(800))
    counts = Counter((p.task, p.prompt, p.label) for p in prompts)
    assert set(counts) == {("one", "1", "x"), ("two", "2", None)}
    assert abs(counts["one", "1", "x"] - 600) < 5 * 12.3, "binomial with mean 600 and deviation 12.2"


def test_no_data_at_all_names_the_flags(source, refused):
    error = refused("CFG04", source)
    assert "--prompt-data" in error.fix
    assert "--plugin" in error.fix


def test_a_missing_chat_template_is_found_before_any_row_is_read(write, source, refused):
    error = refused("TOK41", source, write({"input": "x"}), apply_chat_template=True)
    assert error.where == "data.apply_chat_template"
    assert "data.apply_chat_template=false" in error.fix
    assert "chat_template.jinja" in error.fix


class Squares:
    """A plugin's rows."""

    def __init__(self, count=5, **fields):
        self.count, self.fields = count, fields

    def __len__(self):
        return self.count

    def at(self, position):
        return Prompt(id="", prompt=f"{position}*{position}=", label=position**2, **self.fields)

    def state(self):
        return {"count": self.count}


class Endless(Squares):
    """Rows without a number, up to ``count``."""

    def __len__(self):
        raise TypeError("endless")

    def at(self, position):
        if position >= self.count:
            raise IndexError(position)
        return super().at(position)


def with_source(rows):
    class Plugins(NoPlugins):
        def prompts(self, task, ctx):
            return rows

    return Plugins()


def test_a_plugins_rows_get_order_epochs_ids_and_tokens(source):
    found = source(plugins=with_source(Squares()), rollout_shuffle=True)
    prompts = found.next(10)
    assert sorted(p.label for p in prompts[:5]) == [0, 1, 4, 9, 16]
    assert sorted(p.label for p in prompts[5:]) == [0, 1, 4, 9, 16]
    assert [p.id for p in prompts] == [f"main/{i}" for i in range(10)]
    two = next(p for p in prompts if p.label == 4)
    assert (two.prompt, two.tokens, two.task) == ("2*2=", [5, 15, 5, 17], "default")
    assert two.metadata["row_id"] == "default[2]"


def test_a_plugin_may_bring_tokens_and_a_task_of_its_own(source):
    found = source(plugins=with_source(Squares(tokens=[9, 9], task="squares")))
    (prompt,) = found.next(1)
    assert (prompt.tokens, prompt.task) == ([9, 9], "squares")


def test_a_plugins_messages_are_rendered(source, chat_tokenizer):
    class Chat(Squares):
        def at(self, position):
            return Prompt(id=f"row{position}", prompt=[{"role": "user", "content": "hi"}])

    (prompt,) = source(plugins=with_source(Chat()), tok=chat_tokenizer).next(1)
    assert prompt.prompt == "user: hi\nassistant: "
    assert prompt.metadata["row_id"] == "row0"


def test_an_endless_source_that_ends_gives_fewer(source):
    found = source(plugins=with_source(Endless(3)))
    assert len(found.text(100)) == len(found.text(50)) > 0
    assert len(found.next(2)) == 2
    assert len(found.next(5)) == 1
    assert found.next(5) == []


def test_a_source_that_has_ended_stays_so_after_a_restore(source):
    class ByTask(NoPlugins):
        def prompts(self, task, ctx):
            return {"short": Endless(2), "b": Squares(7), "c": Squares(9)}[task.name]

    tasks = ({"name": "short", "weight": 5.0}, {"name": "b"}, {"name": "c"})

    def fresh():
        return source(tasks=tasks, plugins=ByTask())

    whole = [(p.task, p.label) for p in fresh().next(80)]
    for after in range(20, 60):
        first, again = fresh(), fresh()
        first.next(after)
        again.restore(first.state())
        assert [(p.task, p.label) for p in again.next(20)] == whole[after : after + 20]


def test_a_plugin_prepares_the_rows_that_are_drawn_next_and_no_others(source):
    class Prepared(Squares):
        def __init__(self, count):
            super().__init__(count)
            self.waiting = []

        async def prepare(self, positions):
            self.waiting += positions

        def at(self, position):
            self.waiting.remove(position)
            return super().at(position)

    class EndlessPrepared(Prepared):
        __len__ = Endless.__len__

    sources = {"a": Prepared(5), "b": EndlessPrepared(1000), "plain": Squares(3)}

    class ByTask(NoPlugins):
        def prompts(self, task, ctx):
            return sources[task.name]

    rows = source(tasks=({"name": "a"}, {"name": "b"}, {"name": "plain"}), plugins=ByTask(), rollout_shuffle=True)
    for count in (1, 7, 20):
        before = rows.state()
        asyncio.run(rows.prepare(count))
        assert rows.state() == before
        assert len(rows.next(count)) == count
        assert sources["a"].waiting == sources["b"].waiting == []


def test_a_source_that_fails_to_prepare_names_its_task(source):
    class Broken(Squares):
        async def prepare(self, positions):
            raise OSError("no worker")

    with pytest.raises(PluginError, match="OSError: no worker") as caught:
        asyncio.run(source(plugins=with_source(Broken())).prepare(2))
    assert (caught.value.code, caught.value.where) == ("PLG56", "default[0, 1]")


def test_a_resumed_plugin_source_must_be_the_same(source, refused):
    state = source(plugins=with_source(Squares(5))).state()
    error = refused("DAT29", source(plugins=with_source(Squares(6))).restore, state)
    assert '{"count": 5}' in error.why
    assert '{"count": 6}' in error.why


def test_a_plugins_task_without_rows_is_refused(source, refused):
    refused("DAT17", source, plugins=with_source(Squares(0)))


@pytest.mark.parametrize(
    ("rows", "code", "what"),
    [
        (lambda position: 1 / 0, "PLG56", "ZeroDivisionError"),
        (lambda position: {"prompt": "x"}, "PLG57", "dict"),
        (lambda position: [][position], "PLG56", "has 5 rows, but not this one"),
    ],
    ids=["raises", "no Prompt", "index error"],
)
def test_a_plugins_source_that_breaks_names_task_and_row(source, rows, code, what):
    broken = Squares()
    broken.at = rows
    found = source(plugins=with_source(broken))
    with pytest.raises(PluginError) as caught:
        found.next(1)
    assert caught.value.code == code
    assert what in caught.value.what
    assert caught.value.where == "default[0]"
    assert caught.value.fix


def test_a_plugins_prompt_that_is_too_long_is_dropped_and_counted(source):
    found = source(plugins=with_source(Squares(12)), rollout_max_prompt_len=4)
    assert len(found.next(20)) == 20
    assert found.counts() == {"read": 22, "prompts": 20, "dropped/overlong": 2}


@pytest.fixture
def evaluation(tmp_path, tokenizer):
    """Read the evaluation sets of a config."""

    def make(*, plugins=None, sections=None, **keys):
        config = Config(eval=keys, **(sections or {}))
        ctx = Context(config=config, run_dir=tmp_path, evaluation=True)
        return eval_sets(config, plugins or NoPlugins(), tokenizer, ctx)

    return make


def test_evaluation_sets_are_read_whole_in_row_order(write, evaluation):
    one = write(*({"input": str(i), "label": i} for i in range(4)), name="one.jsonl")
    two = write({"q": "2"}, name="two.jsonl")
    sets = evaluation(
        eval_prompt_data=("one", f"{one}@[1:3]"),
        eval_tasks=({"name": "two", "prompt_data": str(two), "input_key": "q", "n_samples_per_prompt": 4},),
        sections={"data": {"label_key": "", "rollout_shuffle": True}},
    )
    assert [(s.name, s.task.name, texts(s.prompts)) for s in sets] == [
        ("one", "default", ["1", "2"]),
        ("two", "two", ["2"]),
    ]
    assert [p.id for p in sets[0].prompts] == ["eval/one/0", "eval/one/1"]
    assert [p.task for s in sets for p in s.prompts] == ["default", "default", "two"]
    assert sets[1].task.n_samples_per_prompt == 4


def test_an_evaluation_set_is_judged_like_the_training_task_of_its_name(write, evaluation):
    path = str(write({"input": "1"}))
    tasks = ({"name": "a", "prompt_data": path}, {"name": "b", "prompt_data": path})
    sets = evaluation(eval_prompt_data=("b", path, "c", path), sections={"data": {"tasks": tasks}})
    assert [s.task.name for s in sets] == ["b", "c"]
    (only,) = evaluation(eval_prompt_data=("c", path), sections={"data": {"tasks": tasks[:1]}})
    assert (only.name, only.task.name) == ("c", "a")


def test_a_plugins_evaluation_set_needs_no_file(evaluation, refused):
    (found,) = evaluation(eval_tasks=({"name": "held_out"},), plugins=with_source(Squares(3)))
    assert [p.label for p in found.prompts] == [0, 1, 4]
    assert found.prompts[2].id == "eval/held_out/2"
    refused("CFG04", evaluation, eval_tasks=({"name": "held_out"},), plugins=with_source(Endless()))


def test_a_file_named_for_evaluation_wins_over_a_plugin(write, evaluation):
    path = str(write({"input": "1"}))
    (found,) = evaluation(eval_prompt_data=("x", path), plugins=with_source(Squares(3)))
    assert texts(found.prompts) == ["1"]


def test_an_evaluation_set_has_its_own_template_category_and_limit(write, tmp_path, chat_tokenizer):
    path = str(write({"input": "1", "kind": "a", "k2": 3}, {"input": "22", "kind": "b", "k2": 4}))
    plain = EvalTask(name="plain", prompt_data=path, apply_chat_template="off")
    chat = EvalTask(name="chat", prompt_data=path, category_key="k2")

    def sets(*tasks):
        config = Config(
            data={"apply_chat_template": True},
            rollout={"rollout_max_context_len": 64, "rollout_max_response_len": 8},
            eval=EvalSection(eval_tasks=tasks, eval_category_key="kind"),
        )
        ctx = Context(config=config, run_dir=tmp_path, evaluation=True)
        return eval_sets(config, NoPlugins(), chat_tokenizer, ctx)

    one, two = sets(plain, chat)
    assert texts(one.prompts) == ["1", "22"]
    assert all("1" in text and len(text) > 1 for text in texts(two.prompts)[:1])
    assert [p.metadata["category"] for p in (*one.prompts, *two.prompts)] == ["a", "b", 3, 4]
    with pytest.raises(DataError, match="every row"):
        sets(chat.model_copy(update={"max_response_len": 63}))  # one token of the context is left


def test_a_category_that_a_row_lacks_names_the_key(write, evaluation, refused):
    path = str(write({"input": "1"}))
    error = refused("DAT18", evaluation, eval_prompt_data=("x", path), eval_category_key="kind")
    assert "eval.eval_category_key" in error.fix


def test_media_go_from_their_columns_into_the_sample_of_a_function(write, source, refused, tmp_path):
    path = write({"input": "x", "pic": "a.png", "clips": ["b.mp4", "c.mp4"]})
    keys = {"multimodal_keys": {"image": "pic", "video": "clips"}}
    function = {"rollout": {"rollout_function_path": "own:generate"}}
    (sample,) = pending_group(source(path, sections=function, **keys).next(1)[0], Config(), count=1).samples
    files = {kind: [Path(one).name for one in values] for kind, values in sample.multimodal_inputs.items()}
    assert files == {"images": ["a.png"], "videos": ["b.mp4", "c.mp4"]}
    assert Path(sample.multimodal_inputs["images"][0]).parent == tmp_path
    assert "takes no images or videos" in refused("DAT41", source, path, **keys).what


def test_evaluation_counts_what_it_leaves_out(write, evaluation, refused):
    path = str(write({"input": "1"}, {"input": "1234"}))
    (found,) = evaluation(eval_prompt_data=("x", path), sections={"data": {"rollout_max_prompt_len": 2}})
    assert (len(found.prompts), found.dropped) == (1, {"overlong": 1})
    sections = {"data": {"rollout_max_prompt_len": 2}}
    refused("DAT27", evaluation, eval_prompt_data=("x", f"{path}@[1:]"), sections=sections)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"eval_prompt_data": ("a",)}, "CFG03"),
        ({"eval_prompt_data": ("../a", "rows.jsonl")}, "CFG03"),
        ({"eval_prompt_data": ("a", "{path}", "a", "{path}")}, "CFG07"),
        ({"eval_tasks": ({"name": "a"},)}, "CFG04"),
    ],
    ids=["no pair", "a path as name", "a name twice", "no data"],
)
def test_evaluation_settings_that_cannot_be_meant(write, evaluation, refused, keys, code):
    path = str(write({"input": "1"}))
    filled = {
        name: tuple(v.format(path=path) if isinstance(v, str) else v for v in values) for name, values in keys.items()
    }
    assert refused(code, evaluation, **filled).where.startswith("eval.eval_")
