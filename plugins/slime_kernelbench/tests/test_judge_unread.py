"""What the policy did not follow raises where it stands, and everything else is where and what it was."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable

import pytest
from corpus_of_kernels import problem_of, sources

from slime_kernelbench.judge import policy
from slime_kernelbench.judge.module import executed
from slime_kernelbench.judge.unread import WHY, without_unread
from slime_kernelbench.types import Verdict


def closed(text: str, *read: str) -> str:
    """The text with all functions closed out but those named ``read``."""
    tree = ast.parse(text)
    kept = {id(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in read}
    return without_unread(text, tree, kept)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x): return x",
        "def f(x): return x;  # as it was",
        "def f(x):\n    '''What it does.'''\n    return x\n",
        "def f(x): return (x,\n  1)\n",
        "def f(x):\n\tif x:\n\t\treturn '''a\nb'''\n\telse: pass ;\n",
        "def f(x):\r\n    y = x\r\n    return y\r\n",
        "def größe(x): ö = x; return ö\ndef f(x): ä = 'ß'; return größe(ä)",
        "def f(x):\n    def g(y):\n        return y\n    return g(x)\n",
        "def f(x):\n    @d  # what g is\n    @d\n    def g(y):\n        return y\n    return g(x)\n",
        "def f(x):\n    @(  # @d\n      d)\n    class G:\n        y = x\n    return G\n",
    ],
    ids=[
        "one line",
        "comment",
        "docstring",
        "brackets",
        "tabs",
        "crlf",
        "letters",
        "nested",
        "decorated",
        "decorated class",
    ],
)
def test_an_unread_function_raises_and_what_follows_stays_in_its_line(text: str) -> None:
    found = closed(text + "\nlast = 1\n")
    names: dict[str, object] = {}
    executed(found, "text", names)
    with pytest.raises(RuntimeError, match=f"f {WHY}"):
        names["f"](1)  # type: ignore[operator]
    assert ast.parse(found).body[-1].lineno == ast.parse(text + "\nlast = 1\n").body[-1].lineno


def test_read_functions_are_as_they_were_and_errors_in_their_lines() -> None:
    text = "def f(x):\n    return g(\n        x)\n\n\ndef g(x):\n    return [\n        x,\n        x]\n\n\n"
    text += "def h(x):\n    return 1 / x\n"
    names: dict[str, object] = {}
    executed(closed(text, "f", "h"), "text", names)
    assert names["h"](2) == 0.5  # type: ignore[operator]
    with pytest.raises(RuntimeError) as caught:
        names["f"](1)  # type: ignore[operator]
    assert [frame.lineno for frame in traceback.extract_tb(caught.tb)[1:]] == [2, 7]


def test_only_code_that_makes_the_answer_of_a_candidate_runs() -> None:
    text = sources("honest")["submodules"].split("\n", 1)[1]
    left = "\n\ndef get_inputs():\n    return [torch.rand(3)]\n\n\n"
    left += "class Left(nn.Module):\n    def forward(self, x):\n        return x\n"
    reading = policy.read(text + left)
    assert reading.status == "ok"
    assert reading.text.startswith(text)
    assert reading.text.count(WHY) == 2


@pytest.mark.parametrize("name", sources("honest"))
def test_no_function_that_honest_candidates_run_is_shut(name: str) -> None:
    text = sources("honest")[name]
    tree = ast.parse(policy.read(text).text)
    shut = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and WHY in ast.unparse(node.body)
        and "abstractmethod" not in map(ast.unparse, node.decorator_list)
    }
    assert shut <= {"backward", "benchmark", "get_inputs", "get_init_inputs", "main"}


def test_the_judge_runs_what_the_policy_read_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, with_judge: Callable[..., Verdict]
) -> None:
    source = sources("honest")["submodules"] + "\n# read in part\n"
    monkeypatch.setattr(policy, "read", lambda text, allow: policy.Reading(status="ok", text=closed(text, "__init__")))
    verdict = with_judge(lambda judge: judge.judge(source, problem_of(source)))
    assert verdict.status == "runtime_error"
    assert verdict.diagnostics[0].message == f"forward {WHY}"
