"""`slime config show | keys | check`."""

import json
import tomllib

import pytest

from slime_core.config.fields import core_keys

pytestmark = pytest.mark.integration


def test_show_prints_toml_that_loads_to_the_same_config(cli, tmp_path):
    first = cli("config", "show", "--lr", "0.5", "--plugin", "rm_math", "--digits", "3")
    assert (first.code, first.err) == (0, "")
    (tmp_path / "again.toml").write_text(first.out)
    again = cli("config", "show", "again.toml")
    assert again.out == first.out
    assert tomllib.loads(first.out)["train"]["lr"] == 0.5
    assert tomllib.loads(first.out)["plugin"]["rm_math"]["digits"] == 3


def test_show_as_json_has_every_section(cli):
    data = json.loads(cli("config", "show", "--json").out)
    assert {"seed", "train", "rollout", "data", "stage"} <= set(data)


def test_one_stage_can_be_shown_resolved(cli, tmp_path):
    (tmp_path / "r.toml").write_text("[[stage]]\nname = 'a'\nlr = 0.25\n[[stage]]\nname = 'b'\n")
    assert tomllib.loads(cli("config", "show", "r.toml", "--stage", "a").out)["train"]["lr"] == 0.25
    done = cli("config", "show", "r.toml", "--stage", "c")
    assert done.code == 2
    assert "use one of: a, b" in done.err


def test_keys_lists_every_core_key(cli):
    rows = json.loads(cli("config", "keys", "--json").out)
    assert [row["key"] for row in rows] == [key.path for key in core_keys().values()]
    assert set(rows[0]) == {"section", "key", "flag", "type", "default", "text"}
    assert all(row["text"] for row in rows), "every key says what it does"


@pytest.mark.parametrize("word", ["train", "clip_grad", "--clip-grad", "train.clip_grad"])
def test_keys_can_be_asked_by_section_or_part_of_a_name(cli, word):
    done = cli("config", "keys", word) if not word.startswith("--") else cli("config", "keys", "--", word)
    assert done.code == 0
    assert "clip_grad" in done.out
    assert "rollout_batch_size" not in done.out


def test_keys_of_a_plugin(cli):
    rows = json.loads(cli("config", "keys", "rm_math", "--plugin", "rm_math", "--json").out)
    assert "plugin.rm_math.digits" in [row["key"] for row in rows]


def test_keys_that_do_not_exist_are_answered_with_the_nearest(cli):
    done = cli("config", "keys", "clip_gard")
    assert done.code == 2
    assert "did you mean 'clip_grad'?" in done.err


def test_check_says_ok_and_the_stages(cli):
    done = cli("config", "check", "--plugin", "rm_math")
    assert done.code == 0
    assert done.out.startswith("ok")
    assert "warmup, grpo" in done.out
    answer = json.loads(cli("config", "check", "--plugin", "rm_math", "--json").out)
    assert answer["ok"] is True
    assert answer["plugins"] == ["rm_math"]
