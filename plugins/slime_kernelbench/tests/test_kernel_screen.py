"""The screen of problems: references in the sandbox, trivial answers by the judge's own comparison."""

import asyncio
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from slime_kernelbench.commands import kernelbench
from slime_kernelbench.problems import load, shipped
from slime_kernelbench.problems.screen import PRELOAD, screen
from slime_kernelbench.types import KernelProblem
from slime_sandbox import Policy, Sandbox

pytestmark = pytest.mark.integration

FRAME = """\
import torch
from torch import nn

SIZE = 24

class Model(nn.Module):
    def forward(self, x, y):
        {body}

def get_inputs():
    return [{inputs}, torch.randn(SIZE, 2 * SIZE)]

def get_init_inputs():
    return []
"""


def problem(body, inputs="torch.randn(SIZE, 2 * SIZE)"):
    return KernelProblem(id="made/up", name="made_up", source=FRAME.format(body=body, inputs=inputs))


SOUND = (
    "return x + y",
    "return torch.softmax(x, dim=1)",
    "return x > y",
    "return torch.argmax(x, dim=1)",
    "return x, y.sum()",
)
UNSOUND = {
    "return (x - x) * y": ["zeros pass", "its first output passes"],
    "return torch.clamp(x, max=-100.0) * 0 + 3.5": ["the constant 3.5 passes", "its first output passes"],
    "return torch.softmax(x.sum(dim=1, keepdim=True), dim=1)": ["ones pass", "its first output passes"],
    "return y * 1.0": ["input 2 passes"],
    "return torch.ones_like(x) + 1e-12 * x": ["ones pass", "its first output passes"],
    "return torch.arange(float(x.shape[0]))": ["its first output passes"],
    "import os, struct; return x * struct.unpack('B', os.urandom(1))[0]": ["it gives other bits every time"],
    "raise RuntimeError('no such layer')": ["its reference does not run: "],
    "import os; os.abort()": ["its reference could not be run: died"],
    "return x / 0": ["its reference does not run: "],
}


def screen_them(problems):
    """What is found out about problems, by name; one fork server."""

    async def all_of_them():
        async with await Sandbox.open(Policy(), preload=PRELOAD) as box:
            return [await screen(each, box) for each in problems]

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def screened():
    """Every problem of this file."""
    bodies = [*SOUND, *UNSOUND]
    return dict(zip(bodies, screen_them(map(problem, bodies)), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("body", SOUND)
def test_a_problem_that_asks_something_is_sound(screened, body):
    assert (screened[body].verdict, screened[body].reasons) == ("sound", ())
    assert screened[body].cases >= 8


@pytest.mark.nightly
@pytest.mark.parametrize("body", UNSOUND)
def test_a_problem_that_a_trivial_answer_passes_is_named_with_why(screened, body):
    found = screened[body]
    assert found.verdict == "unsound"
    missing = [start for start in UNSOUND[body] if not any(reason.startswith(start) for reason in found.reasons)]
    assert missing == [], found.reasons


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.nightly)])
def test_problems_of_ours_are_sound(every):
    found = screen_them(shipped()[::every])
    assert {each.problem.id: each.reasons for each in found if each.verdict != "sound"} == {}


def test_the_command_prints_a_row_a_problem_and_its_exit_code(tmp_path):
    rows = [replace(problem(body), id=name) for name, body in (("zeros", "return x * 0"), ("fine", "return x + y"))]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"id": row.id, "code": row.source}) + "\n" for row in rows))
    done = CliRunner().invoke(
        kernelbench, ["screen", "--problems", str(path), "--out", str(tmp_path / "sound.jsonl"), "--json"]
    )
    assert [(row["id"], row["verdict"]) for row in json.loads(done.stdout)] == [
        ("zeros", "unsound"),
        ("fine", "sound"),
    ]
    assert done.exit_code == 1
    assert [(each.id, each.source) for each in load(tmp_path / "sound.jsonl")] == [("fine", rows[1].source)]
