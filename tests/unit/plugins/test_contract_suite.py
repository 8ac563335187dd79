"""The suite that plugin authors run finds each broken promise, and only that one."""

import signal

import pytest

from slime_core.testing.plugins import check_plugin

pytestmark = pytest.mark.unit

HEAD = "slime_api = 1\nimport itertools\nimport slime_core\nfrom slime_core.types import Prompt\n"
ROWS = """
class Rows:
    def __len__(self):
        return 3
    def at(self, position):
        return Prompt(id="", position=position, prompt="1+1=", label="2")
    def state(self):
        return {"version": 1}

@slime_core.hookimpl
def slime_prompts(task, ctx):
    return Rows()
"""
REWARD = """
@slime_core.hookimpl
def slime_reward(group, ctx):
    return [float(s.response == s.label) for s in group.samples]
"""
STATE = """
class Holder:
    level = 1
    def state(self):
        return {"level": self.level}
    def load(self, state):
        self.level = state["level"]
holder = Holder()

@slime_core.hookimpl
def slime_state():
    return holder
"""
ESTIMATOR = """
import numpy as np
@slime_core.hookimpl
def slime_advantage():
    return [slime_core.Estimator(name="mine", fn=lambda batch, train: {"advantages": np.ones(len(batch.loss_mask))})]
"""
GENERATE = """
@slime_core.hookimpl
async def slime_generate(group, ctx):
    for sample in group.samples:
        await ctx.generate(sample)
        sample.append_response([3], mask=0)
    return group
"""


def findings(install_plugin, source):
    install_plugin("geo", HEAD + source)
    return {finding.name: finding for finding in check_plugin("geo")}


def test_a_plugin_that_keeps_everything_has_no_complaint(install_plugin):
    found = findings(install_plugin, ROWS + REWARD + STATE + ESTIMATOR + GENERATE)
    assert {name: f.status for name, f in found.items()} == {
        "import": "ok",
        "options": "skip",
        "recipes": "skip",
        "checks": "skip",
        "command": "skip",
        "prompts": "ok",
        "generation": "ok",
        "rewards": "ok",
        "filter": "skip",
        "names": "ok",
        "state": "ok",
    }
    assert found["prompts"].found == "default: 3 rows"
    assert found["rewards"].found.endswith("label 1")


@pytest.mark.parametrize(
    ("source", "promise", "told"),
    [
        (ROWS.replace('label="2"', "label=str(next(COUNT))") + "COUNT = itertools.count()\n", "prompts", "differs"),
        (ROWS.replace('"version": 1', '"version": {1}'), "prompts", "cannot be saved"),
        (ROWS.replace("return Prompt(", "return dict("), "prompts", "is a dict"),
        (ROWS.replace("return Rows()", "return []"), "prompts", "PLG57"),
        (REWARD.replace("float(", "s.response[0] and float("), "rewards", "IndexError"),
        (REWARD.replace("float(s.response == s.label)", "float('nan')"), "rewards", "PLG58"),
        (STATE.replace('"level": self.level', '"level": {self.level}'), "state", "cannot be saved"),
        (STATE.replace('self.level = state["level"]', "self.level += 1"), "state", "differs after load"),
        (ESTIMATOR.replace("np.ones(len(batch.loss_mask))", "np.ones(len(batch))"), "names", "PLG59"),
        (REWARD.replace("    return [", "    group.samples[0].tokens[0] = 9\n    return ["), "rewards", "PLG61"),
        (
            GENERATE.replace("    return group", "    group.rollouts.popitem()\n    return group"),
            "generation",
            "came back",
        ),
        (GENERATE.replace("mask=0)", "mask=0); sample.loss_mask = [1]"), "generation", "lengths"),
        ("@slime_core.hookimpl\ndef slime_filter(group):\n    return False\n", "filter", "PLG57"),
        ("@slime_core.hookimpl\ndef slime_checks():\n    return [1]\n", "checks", "slime_core.Check"),
        ("@slime_core.hookimpl\ndef slime_command():\n    return print\n", "command", "click.Group"),
        (
            "@slime_core.hookimpl\ndef slime_recipes():\n    return {'default': '/nowhere.toml'}\n",
            "recipes",
            "/nowhere.toml",
        ),
        ("@slime_core.hookimpl\ndef slime_options():\n    return dict\n", "options", "PLG57"),
    ],
)
def test_a_broken_promise_is_found_where_it_is(install_plugin, source, promise, told):
    found = findings(install_plugin, source)
    finding = found[promise]
    assert finding.status == "fail"
    assert told in finding.found + finding.fix
    others = {name for name, f in found.items() if f.status == "fail"} - {promise}
    assert others <= {"generation", "rewards", "filter"} if promise == "prompts" else not others


@pytest.mark.parametrize(
    ("source", "promise", "told"),
    [
        (
            REWARD.replace("float(s", "next(COUNT) + float(s") + "COUNT = itertools.count()\n",
            "rewards",
            "for the same answers",
        ),
        (
            "import pydantic\nclass O(pydantic.BaseModel, extra='forbid', frozen=True):\n    x: int\n@slime_core.hookimpl\ndef slime_options():\n    return O\n",
            "options",
            "required: x",
        ),
        (
            "import pydantic\nclass O(pydantic.BaseModel):\n    x: int = 1\n@slime_core.hookimpl\ndef slime_options():\n    return O\n",
            "options",
            "not frozen",
        ),
    ],
    ids=["draws", "an option without a default", "an open model"],
)
def test_what_is_doubtful_is_a_warning(install_plugin, source, promise, told):
    finding = findings(install_plugin, source)[promise]
    assert finding.status == "warn"
    assert told in finding.found


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("os.chdir('/')", "changed the working folder"),
        ("signal.signal(signal.SIGUSR2, signal.SIG_IGN)", "changed the handler of SIGUSR2"),
        ("random.random()", "drew from Python's random"),
    ],
)
def test_what_a_hook_changes_of_the_process_is_a_warning(install_plugin, tmp_path, monkeypatch, harm, told):
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGUSR2)
    source = REWARD.replace("def slime", "async def slime").replace("    return [", f"    {harm}\n    return [")
    found = findings(install_plugin, "import os, random, signal\n" + source)
    signal.signal(signal.SIGUSR2, handler)
    assert found["manners"].status == "warn"
    assert f"geo.slime_reward {told}" in found["manners"].found
    assert found["rewards"].status == "ok"


def test_a_plugin_that_does_not_load_has_that_one_finding(install_plugin):
    (finding,) = findings(install_plugin, "import no_such_package\n").values()
    assert (finding.name, finding.status) == ("import", "fail")
    assert "PLG50" in finding.found


def test_the_demonstration_plugin_keeps_its_promises():
    assert [f for f in check_plugin("rm_math") if f.status in ("fail", "warn")] == []


def test_a_recipe_that_does_not_name_its_plugin_is_found(install_plugin, tmp_path):
    recipe = tmp_path / "default.toml"
    recipe.write_text('name = "x"\n')
    source = f"@slime_core.hookimpl\ndef slime_recipes():\n    return {{'default': {str(recipe)!r}}}\n"
    finding = findings(install_plugin, source)["recipes"]
    assert finding.status == "fail"
    assert 'plugins = ["geo"]' in finding.fix


def test_a_plugin_whose_recipe_applies_a_chat_template_is_tried_with_one(install_plugin, tmp_path):
    recipe = tmp_path / "default.toml"
    recipe.write_text('plugins = ["chats"]\n[data]\napply_chat_template = true\n')
    source = f"""
from pathlib import Path
import slime_core

@slime_core.hookimpl
def slime_recipes():
    return {{"default": Path({str(recipe)!r})}}

@slime_core.hookimpl
async def slime_generate(group, ctx):
    text = ctx.tokenizer.apply_chat_template([{{"role": "user", "content": "x"}}], add_generation_prompt=True)
    assert text == "user: x\\nassistant: "
    return group
"""
    install_plugin("chats", source)
    found = {finding.name: finding for finding in check_plugin("chats")}
    assert found["generation"].status == "ok", found["generation"]
