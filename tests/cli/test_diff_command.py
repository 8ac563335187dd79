"""`slime diff` on whole runs: what it says, as text and as JSON, and that it changes nothing."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slime_cli.replaying.difference import compare_folders
from slime_core.errors import StorageError
from slime_core.report import RunDir

pytestmark = pytest.mark.integration


def weights(path, **tensors):
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(path / "model.safetensors"))
    return path


def test_adapters_within_are_compared_too(tmp_path):
    for run, value in (("one", 1.0), ("other", 3.0)):
        weights(tmp_path / run, a=torch.zeros(2))
        weights(tmp_path / run / "adapter" / "solver", a=torch.full((2,), value))
    assert compare_folders(tmp_path / "one", tmp_path / "other").differ == {"adapter/solver/a": 2.0}


def test_tensors_are_compared_bit_for_bit(tmp_path):
    base = {"a": torch.tensor([1.0, float("nan"), 0.0]), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    one = weights(tmp_path / "one", **base)
    assert compare_folders(one, weights(tmp_path / "same", **base)).equal
    found = compare_folders(one, weights(tmp_path / "signed", **base | {"a": torch.tensor([1.0, float("nan"), -0.0])}))
    assert not found.equal
    assert list(found.differ) == ["a"]
    large = base | {"a": base["a"] + 1e-3, "b": base["b"] * 3}
    found = compare_folders(one, weights(tmp_path / "large", **large))
    assert found.differ["b"] == 2.0
    found = compare_folders(one, weights(tmp_path / "other", c=base["a"], b=base["b"].float()))
    assert found.only == (["a"], ["c"])
    assert found.shapes == {"b": ("bfloat16 [2, 2]", "float32 [2, 2]")}
    with pytest.raises(StorageError, match="STO111"):
        compare_folders(one, tmp_path)


@pytest.fixture(scope="module")
def reseeded(small):
    """The small run with another seed."""
    return small.again("reseeded", "--seed", "6")


def test_a_run_equals_its_copy(small, tmp_path, cli):
    shutil.copytree(small.run, tmp_path / "copy")
    done = cli("diff", small.run, tmp_path / "copy")
    assert (done.code, done.out.splitlines()[0]) == (0, "equal in all 4 steps")
    assert "tensors, every bit equal" in done.out


def test_another_seed_parts_where_the_first_token_is_drawn(small, reseeded, cli):
    done = cli("diff", small.run, reseeded)
    assert done.code == 1
    first = done.out.splitlines()[0]
    assert first.startswith("step 2: same samples; ")
    assert "samples have other tokens, first grpo/0-0 at response token 0: " in first
    assert "'" in first  # the tokens' text: the tokenizer is near
    assert re.search(r"seed +5 +6 +every draw derives from it", done.out)


def test_json_has_stable_keys(small, reseeded, cli):
    facts = json.loads(cli("diff", small.run, reseeded, "--json").out)
    assert set(facts) == {
        *("runs", "config", "equal", "first_divergence", "first_step", "steps", "only_in_first", "only_in_second"),
        *("evaluations", "final", "table"),
    }
    assert (facts["equal"], facts["first_step"]) == (False, 2)
    assert [step["first"] for step in facts["steps"]] == ["", "tokens", "tokens", "tokens"]
    assert [row["key"] for row in facts["config"]] == ["seed", "rollout.save_debug_rollout_data"]
    assert facts["final"]["equal"] is False


def test_weights_of_final_count_though_every_step_is_equal(small, tmp_path, cli):
    shutil.copytree(small.run, tmp_path / "copy")
    path = tmp_path / "copy" / "final" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    done = cli("diff", small.run, tmp_path / "copy")
    assert done.code == 1
    assert done.out.startswith("equal in all 4 steps; final/ differs: 1 of ")
    assert cli("diff", small.run, tmp_path / "copy", "--no-weights").code == 0


def test_comparing_changes_nothing(small, tmp_path, cli):
    shutil.copytree(small.run, tmp_path / "copy")
    before = tree(tmp_path / "copy")
    with RunDir.reopen(tmp_path / "copy") as held:  # somebody runs there
        after_opening = copy.copy(tree(tmp_path / "copy"))
        assert cli("diff", small.run, held.path).code == 0
    assert tree(tmp_path / "copy") == after_opening
    assert set(before) == set(after_opening)


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def test_a_folder_that_is_no_run_is_refused(tmp_path, small, cli):
    assert cli("diff", small.run, tmp_path).code == 2


def test_a_table_of_many_steps_shows_those_around_the_first_that_differs():
    from slime_cli.diff import MOST, _shortened

    rows = [[version, "main", "=" if version < 300 else "differ"] for version in range(1, 401)]
    shown = _shortened(rows)
    assert len(shown) == MOST
    assert 300 in [row[0] for row in shown]
    assert np.diff([row[0] for row in shown]).max() == 1
