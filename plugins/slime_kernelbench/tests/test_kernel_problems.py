"""Problems from every place, bad rows, the split and its guard. Nothing of a problem is run here."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from slime_core import ConfigError, DataError
from slime_kernelbench.problems import load, shipped, split
from slime_kernelbench.problems.prompts import problem_of, rows_of
from slime_kernelbench.problems.split import is_held_out, likeness, shingles

pytestmark = pytest.mark.unit

SHARED = Path(__file__).parents[4] / "shared" / "data" / "kernelbench" / "kernel_bench_triton_level_1_2.jsonl"
RELU = """\
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

N = 16

def get_inputs():
    return [torch.rand(N)]

def get_init_inputs():
    return []
"""


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_some_forty_problems_come_with_the_plugin_and_each_is_of_the_format():
    problems = shipped()
    assert 30 <= len(problems) <= 45
    assert {problem.level for problem in problems} == {1, 2}
    assert len({problem.id for problem in problems}) == len(problems)
    assert problems[0].id == "slime/1/add"
    assert "class Model" in problems[0].source
    assert load("shipped") == problems
    assert {problem.level for problem in load("shipped", levels=(2,))} == {2}


def test_rows_of_kernelbench_and_of_tritonforge_and_a_file_have_the_same_id(tmp_path):
    plain = {"code": RELU, "level": 1, "name": "19_ReLU", "problem_id": 19}
    forge = {"prompt": [], "label": RELU, "extra_info": {"level": 1, "problem_id": "19", "problem_name": "ReLU"}}
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "19_ReLU.py").write_text(RELU)
    places = (jsonl(tmp_path / "a.jsonl", plain), jsonl(tmp_path / "b.jsonl", forge), tmp_path / "level1")
    found = [load(place)[0] for place in places]
    assert {problem.id for problem in found} == {"kernelbench/1/19"}
    assert {problem.source for problem in found} == {RELU}
    assert [problem.name for problem in found] == ["19_ReLU", "ReLU", "ReLU"]
    assert found[0].where == f"{tmp_path / 'a.jsonl'}:1"


def test_a_folder_of_parquet_files_is_read_as_the_hub_data_set_lies_on_disk(tmp_path):
    (tmp_path / "data").mkdir()
    for level in (1, 2):
        rows = [{"code": RELU, "level": level, "name": f"{n}_x", "problem_id": n} for n in (1, 2)]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"level_{level}-00000-of-00001.parquet")
    expected = ["kernelbench/1/1", "kernelbench/1/2", "kernelbench/2/1", "kernelbench/2/2"]
    assert [problem.id for problem in load(tmp_path)] == expected
    assert [problem.id for problem in load(tmp_path, levels=(2,))] == expected[2:]


def test_a_data_set_with_splits_by_level_is_read_whole_or_by_split(tmp_path):
    def rows(level, count):
        found = [{"code": RELU, "level": level, "name": f"{n}_x", "problem_id": n} for n in range(1, count + 1)]
        return datasets.Dataset.from_list(found)

    datasets.DatasetDict({"level_1": rows(1, 2), "level_3": rows(3, 1)}).save_to_disk(tmp_path / "set")
    found = load(tmp_path / "set")
    assert [problem.id for problem in found] == ["kernelbench/1/1", "kernelbench/1/2", "kernelbench/3/1"]
    assert found[2].where == f"{tmp_path / 'set'}:level_3[0]"
    datasets.DatasetDict({"train": rows(1, 1)}).save_to_disk(tmp_path / "other")
    with pytest.raises(DataError, match="no split 'level_4'"):
        load(tmp_path / "other")


def test_files_of_python_come_in_the_order_of_their_numbers(tmp_path):
    folder = tmp_path / "level2"
    folder.mkdir()
    for name in ("10_b.py", "2_a.py", "__init__.py"):
        (folder / name).write_text("" if name == "__init__.py" else RELU)
    assert [(problem.id, problem.level) for problem in load(tmp_path)] == [
        ("kernelbench/2/2", 2),
        ("kernelbench/2/10", 2),
    ]


@pytest.mark.parametrize(
    ("row", "code", "said"),
    [
        pytest.param({"codes": RELU}, "DAT18", "'codes'", id="no source"),
        pytest.param({"label": RELU}, "DAT18", "extra_info", id="half a row of TritonForge"),
        pytest.param({"code": 3}, "DAT24", "a string of Python", id="a source that is a number"),
        pytest.param({"code": RELU, "level": "1"}, "DAT24", "level", id="a level in quotes"),
        pytest.param({"code": RELU, "level": True}, "DAT24", "level", id="a level that is a boolean"),
        pytest.param({"code": RELU, "problem_id": 1.5}, "DAT24", "problem_id", id="half a number"),
        pytest.param({"label": RELU, "extra_info": 7}, "DAT24", "extra_info", id="extra_info that is a number"),
        pytest.param({"code": RELU, "id": "../../etc/passwd"}, "DAT34", "not an id", id="a path for an id"),
        pytest.param({"code": RELU, "id": "a" * 300}, "DAT34", "not an id", id="a long id"),
        pytest.param({"code": "def f(:"}, "DAT24", "not Python", id="a source that does not parse"),
        pytest.param({"code": "(" * 5000 + ")" * 5000}, "DAT24", "not Python", id="a source nested too deeply"),
        pytest.param({"code": RELU.replace("get_init_inputs", "g")}, "DAT24", "get_init_inputs", id="a part missing"),
        pytest.param({"code": RELU + "#" * 300_000}, "DAT21", "bytes", id="a source that is too long"),
        pytest.param("{", "DAT19", "not JSON", id="no JSON"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_line(tmp_path, row, code, said):
    path = jsonl(tmp_path / "rows.jsonl", {"code": RELU, "id": "fine"}, row)
    with pytest.raises(DataError) as error:
        load(path)
    assert error.value.code == code
    assert f"{path}:2" in error.value.where
    assert said in str(error.value)
    assert error.value.fix


def test_an_id_that_two_rows_have_names_both(tmp_path):
    row = {"code": RELU, "level": 1, "problem_id": 3}
    path = jsonl(tmp_path / "rows.jsonl", row, {"code": RELU}, row)
    with pytest.raises(DataError, match="DAT22") as error:
        load(path)
    assert f"{path}:1" in error.value.why
    assert f"{path}:3" in error.value.why


@pytest.mark.parametrize(("where", "code"), [("nowhere.jsonl", "CFG05"), ("shiped", "CFG05"), ("empty", "DAT17")])
def test_a_place_without_problems_is_an_error(tmp_path, where, code, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        load(where)
    assert error.value.code == code


def test_a_side_is_a_hash_of_the_id_and_does_not_move_when_others_come():
    problems = shipped()
    whole, half = split(problems, heldout=0.3), split(problems[::2], heldout=0.3)
    assert {p.id for p in half.heldout} == {p.id for p in whole.heldout} & {p.id for p in problems[::2]}
    assert len(whole.train) + len(whole.heldout) + len(whole.left_out) == len(problems)
    assert not {p.id for p in whole.train} & {p.id for p in whole.heldout}
    assert split(problems, heldout=0.3, seed=1) != whole
    count = sum(is_held_out(f"p/{number}", 0.3, 0) for number in range(10_000))
    assert 2862 <= count <= 3138  # three standard deviations of a binomial around 3000


def test_problems_that_differ_in_sizes_names_and_comments_alone_are_on_one_side():
    renamed = '"""Another."""\n' + RELU.replace("x", "values").replace("N = 16", "SIZE = 512  # more").replace(
        "(N)", "(SIZE)"
    )
    assert likeness(shingles(RELU), shingles(renamed)) == 1.0
    assert likeness(shingles(RELU), shingles(RELU.replace("relu", "tanh"))) < 0.9
    first = shipped()[0]
    names = [f"p/{number}" for number in range(20)]
    twins = [replace(first, id=name, source=RELU if number % 2 else renamed) for number, name in enumerate(names)]
    sides = split(twins, heldout=0.5)
    assert sides.heldout
    assert sides.train == []
    assert len(sides.left_out) == 20 - len(sides.heldout)


def test_a_sum_over_rows_is_no_near_duplicate_of_a_sum_over_columns():
    found = {problem.name: shingles(problem.source) for problem in shipped()}
    assert likeness(found["sum_rows"], found["sum_columns"]) < 0.9
    assert not [name for name in found if name != "add" and likeness(found[name], found["add"]) >= 0.9]


def test_a_task_is_a_level_and_a_side_and_its_rows_carry_the_problem():
    rows = {
        task: rows_of(task, "shipped", heldout=0.2, seed=0, render=lambda problem: f"solve {problem.name}")
        for task in ("default", "kernelbench", "kernelbench_heldout", "kernelbench_level2", "kernelbench_all")
    }
    assert rows["default"].state() == rows["kernelbench"].state() != rows["kernelbench_heldout"].state()
    assert len(rows["kernelbench_all"]) == len(shipped())
    assert {problem.level for problem in rows["kernelbench_level2"].problems} == {2}
    prompt = rows["kernelbench_all"].at(0)
    assert (prompt.prompt, prompt.position) == ("solve add", 0)
    assert problem_of(prompt) == shipped()[0]
    assert prompt.label == shipped()[0].source


@pytest.mark.parametrize(("task", "code"), [("kernelbensh", "CFG05"), ("kernelbench_level3", "DAT17")])
def test_a_task_that_is_not_there_is_an_error_that_says_what_is(task, code):
    with pytest.raises((ConfigError, DataError)) as error:
        rows_of(task, "shipped", heldout=0.2, seed=0, render=str)
    assert error.value.code == code
    assert error.value.fix


def test_two_hundred_rows_of_tritonforge_are_read():
    if not SHARED.is_file():
        pytest.skip(f"the rows of TritonForge are not here: {SHARED.name}")
    problems = load(SHARED)
    assert len(problems) == 200
    assert {problem.level for problem in problems} == {1, 2}
    sides = split(problems)
    assert "conv_transposed_2D__square_input__asymmetric_kernel" in {twin.name for _, twin in sides.left_out}
