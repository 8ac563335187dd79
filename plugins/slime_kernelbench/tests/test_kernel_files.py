"""`slime kernelbench eval`: which problem a file answers, its rows and exit codes, over HTTP; `problems`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from judge_services import Server, invoke

from slime_core import DataError
from slime_kernelbench.files import entries, find_problem
from slime_kernelbench.problems import answer, shipped

pytestmark = pytest.mark.integration

BOTH = """\
import torch
import triton
from torch import nn

SIZE = 64
BLOCK: int = 16


def double(x):
    return 2 * x


class Model(nn.Module):
    def forward(self, x):
        return double(x)


@triton.jit
def kernel(x, BLOCK):
    pass


class ModelNew(nn.Module):
    def forward(self, x):
        return kernel[(SIZE,)](x, BLOCK)


def get_inputs():
    return [torch.randn(SIZE)]


def get_init_inputs():
    return []
"""


def test_a_file_with_both_models_is_parted_with_its_lines_where_they_were(tmp_path):
    (tmp_path / "both.py").write_text(BOTH)
    (entry,) = entries(tmp_path / "both.py", None)
    lines, candidate, reference = BOTH.split("\n"), entry.source.split("\n"), entry.problem.source.split("\n")
    assert all(line in ("", lines[number]) for number, line in enumerate(candidate))
    assert all(line in ("", lines[number]) for number, line in enumerate(reference))
    assert [word for word in ("class Model(", "get_inputs", "get_init_inputs") if word in entry.source] == []
    assert [word for word in ("ModelNew", "triton.jit", "BLOCK") if word in entry.problem.source] == []
    assert [word for word in ("SIZE = 64", "def double", "class Model(") if word not in entry.problem.source] == []
    assert [word for word in ("SIZE = 64", "BLOCK: int", "@triton.jit") if word not in entry.source] == []
    assert entry.problem.id == "both"


def test_a_candidate_that_leans_on_the_reference_keeps_it_for_the_judge_to_see(tmp_path):
    (tmp_path / "both.py").write_text(BOTH.replace("class ModelNew(nn.Module)", "class ModelNew(Model)"))
    (entry,) = entries(tmp_path / "both.py", None)
    assert "class Model(nn.Module)" in entry.source
    assert "def get_inputs" not in entry.source


def test_the_problem_is_the_one_named_else_the_one_beside_else_a_sum(tmp_path):
    relu = find_problem("relu")
    for name in ("alone.py", "own.py", "no_python.py", "__init__.py"):
        (tmp_path / name).write_text("class ModelNew: ..." if name != "no_python.py" else "(")
    (tmp_path / "own.problem.py").write_text(relu.source)
    found = {Path(entry.file).name: entry.problem.id for entry in entries(tmp_path, None)}
    assert found == {"alone.py": "slime/1/add", "own.py": "own", "no_python.py": "slime/1/add"}
    assert {entry.problem.id for entry in entries(tmp_path, relu)} == {"slime/1/relu"}


def test_a_problem_is_found_by_id_name_or_file(tmp_path):
    assert find_problem("slime/1/relu") == find_problem("relu")
    (tmp_path / "mine.py").write_text(find_problem("relu").source)
    assert find_problem(str(tmp_path / "mine.py")).id == "mine"
    with pytest.raises(DataError, match="softmax") as error:
        find_problem("softmaxx")
    assert error.value.code == "CFG05"


@pytest.mark.parametrize(("name", "code"), [("nothing.py", "CFG05"), ("empty", "DAT17")])
def test_a_place_without_candidates_is_an_error(tmp_path, name, code):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        entries(tmp_path / name, None)
    assert error.value.code == code


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A served judge that does what a candidate's first word says."""
    with Server.stand_in(tmp_path_factory.mktemp("judge"), grace=0) as server:
        yield server


def test_eval_prints_a_row_a_file_and_its_exit_code_says_whether_all_are_right(tmp_path, server):
    for word in ("correct", "wrong", "runtime_error"):
        (tmp_path / f"{word}.py").write_text(word)
    done = server.eval(tmp_path)
    rows = json.loads(done.stdout)
    assert [Path(row["file"]).name for row in rows] == ["correct.py", "runtime_error.py", "wrong.py"]
    assert [row["status"] for row in rows] == ["correct", "runtime_error", "wrong"]
    assert [row["correct"] for row in rows] == [True, False, False]
    assert {tuple(row["flags"]) for row in rows} == {()}
    assert done.exit_code == 1
    done = invoke("eval", tmp_path / "correct.py", "--url", server.url, SLIME_KERNELBENCH_TOKEN=server.token)
    assert done.exit_code == 0
    assert "1 of 1 are correct" in done.stdout


def test_a_file_that_cannot_be_read_has_a_row_that_says_why_and_the_others_are_judged(tmp_path, server):
    (tmp_path / "correct.py").write_text("correct")
    (tmp_path / "dangling.py").symlink_to("nowhere.py")
    (tmp_path / "itself.py").symlink_to("itself.py")
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    with (tmp_path / "vast.py").open("wb") as vast:
        vast.truncate(1 << 40)
    done = server.eval(tmp_path)
    rows = {Path(row["file"]).name: row for row in json.loads(done.stdout)}
    told = {name: [item["message"] for item in row["diagnostics"]] for name, row in rows.items()}
    assert list(rows) == ["correct.py", "dangling.py", "itself.py", "pipe.py", "vast.py"]
    assert [row["status"] for row in rows.values()] == ["correct"] + 4 * ["compile_error"]
    assert ["link to nothing" in told[name][0] for name in ("dangling.py", "itself.py")] == [True, True]
    assert "not a regular file" in told["pipe.py"][0]
    assert "1099511627776 bytes" in told["vast.py"][0]


def test_a_file_with_a_byte_order_mark_is_what_it_is_without(tmp_path):
    for name, problem in (("x.py", "class ModelNew: ..."), ("x.problem.py", find_problem("relu").source)):
        (tmp_path / name).write_text(problem, encoding="utf-8-sig")
    (entry,) = entries(tmp_path, None)
    assert entry.source == "class ModelNew: ..."
    assert entry.problem.source == find_problem("relu").source


def test_eval_without_the_token_or_a_judge_says_what_to_do(tmp_path, server):
    (tmp_path / "x.py").write_text("correct")
    done = invoke("eval", tmp_path, "--url", server.url, SLIME_KERNELBENCH_TOKEN="")
    assert done.exception.code == "CFG09"
    done = invoke("eval", tmp_path, "--url", server.url, "--json", SLIME_KERNELBENCH_TOKEN="another-token-of-mine")
    assert json.loads(done.stdout)[0]["status"] == "infra"
    assert done.exit_code == 1


def test_bench_of_answers_prints_figures(tmp_path, server):
    rows = [{"problem": "slime/1/add", "source": word} for word in ("correct", "wrong", "correct", "wrong")]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("bench", "--answers", tmp_path / "answers.jsonl", "--url", server.url, "--k", "1", "--k", "2")
    report = json.loads(invoke(*words, "--json", SLIME_KERNELBENCH_TOKEN=server.token).stdout)
    assert report["correct"]["value"] == 0.5
    assert report["pass@k"]["2"]["value"] == pytest.approx(5 / 6)
    assert "pass@2" in invoke(*words, SLIME_KERNELBENCH_TOKEN=server.token).stdout


def test_problems_are_listed_with_their_side_and_shown():
    rows = json.loads(invoke("problems", "list", "--json", "--heldout", "0.2").stdout)
    assert [row["id"] for row in rows] == [problem.id for problem in shipped()]
    assert {row["side"] for row in rows} == {"train", "heldout"}
    assert invoke("problems", "show", "add").stdout.rstrip("\n") == find_problem("add").source.rstrip("\n")
    assert "slime/2/attention" in invoke("problems", "list", "--level", "2").stdout


def test_what_a_candidate_says_gives_a_terminal_no_commands(tmp_path, server):
    name = "wrong\x1b[2J.py"
    (tmp_path / name).write_text("wrong")
    done = invoke("eval", tmp_path, "--url", server.url, SLIME_KERNELBENCH_TOKEN=server.token)
    assert "\x1b" not in done.stdout


def test_help_of_every_command_loads_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from slime_kernelbench.commands import kernelbench as k\n"
        "[CliRunner().invoke(k, [n, '--help'], catch_exceptions=False) for n in k.commands]\n"
        "sys.exit([m for m in ('torch', 'httpx', 'triton', 'transformers') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_honest_answer_that_comes_with_the_plugin_is_python():
    compile(answer("add"), "add.py", "exec")
