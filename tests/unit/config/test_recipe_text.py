"""A recipe's text: files, encodings, TOML errors, references to the environment, versions, numbers."""

import pytest

from slime_core.config.load import load_config, read
from slime_core.config.recipe import MAX_BYTES, read_recipe

pytestmark = pytest.mark.unit


def test_missing_recipe_names_the_absolute_path_and_the_folder(recipe, refused, tmp_path):
    error = refused((recipe().parent / "no" / "such.toml").relative_to(tmp_path))
    assert error.code == "CFG05"
    assert error.where == str(tmp_path / "no/such.toml")
    assert str(tmp_path) in error.why
    assert "slime run --plugin NAME" in error.fix


def test_a_folder_is_no_recipe(recipe, refused, tmp_path):
    assert "is a folder" in refused(recipe().parent).what


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        pytest.param("seed = 1\n[train\nlr = 1\n", "recipe.toml:2:", "not valid TOML", id="header not closed"),
        pytest.param("seed 1\n", "recipe.toml:1:", "not valid TOML", id="no equals sign"),
        pytest.param("name = demo\n", "recipe.toml:1:8", "Invalid value", id="string without quotes"),
        pytest.param('seed = 1\nname = "demo', "recipe.toml:2:", "not valid TOML", id="string not closed"),
        pytest.param("train:\n  lr: 1\n", "recipe.toml:1:6", "not valid TOML", id="yaml"),
        pytest.param('{"seed": 1}', "recipe.toml:1:1", "not valid TOML", id="json"),
        pytest.param('name = "a\tb\x01"\n', "recipe.toml:1:", "not valid TOML", id="control character"),
        pytest.param(
            b"seed = 1\nname = '\xff'\n", "recipe.toml:2", "not UTF-8: byte 0xff at offset 17", id="not utf-8"
        ),
        pytest.param("seed = 1".encode("utf-16"), "recipe.toml", "UTF-16", id="utf-16"),
        pytest.param("seed = " + "9" * 5000, "recipe.toml:", "not valid TOML", id="number of 5000 digits"),
    ],
)
def test_text_that_is_not_toml_is_refused_with_line_and_column(recipe, refused, text, place, part):
    error = refused(recipe(text))
    assert error.code == "CFG06"
    assert error.where.startswith(place)
    assert part in error.what
    assert error.fix


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"\xef\xbb\xbfseed = 7\n", id="byte order mark"),
        pytest.param(b"seed = 7\r\n[train]\r\nlr = 1.0\r\n", id="crlf"),
        pytest.param(b"\t seed\t=\t7 # tabs\n", id="tabs"),
        pytest.param(b"seed = 7", id="no newline at the end"),
    ],
)
def test_marks_line_ends_and_tabs_are_accepted(recipe, text):
    assert load_config(recipe(text)).seed == 7


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("seed = 1\nseed = 2\n", 2, id="key"),
        pytest.param("[train]\nlr = 1.0\n[data]\n[train]\nclip_grad = 1.0\n", 4, id="table"),
        pytest.param("data.tasks = [{name = 'a', name = 'b'}]\n", 1, id="inline table"),
        pytest.param("[train]\nlr = 1.0\nlr = 1.0\n", 3, id="key in a table"),
    ],
)
def test_a_key_given_twice_is_refused(recipe, refused, text, line):
    error = refused(recipe(text))
    assert error.code == "CFG07"
    assert error.where.startswith(f"recipe.toml:{line}:")
    assert "keep one" in error.fix


def test_a_recipe_over_one_mebibyte_is_refused_without_parsing_it(recipe, refused):
    error = refused(recipe(b"# " + b"x" * MAX_BYTES))
    assert (error.code, error.where) == ("CFG08", "recipe.toml")
    assert "prompt_data" in error.fix


def test_deep_nesting_is_refused_and_does_not_break_the_parser(recipe, refused):
    assert refused(recipe("x = " + "[" * 50_000)).code in ("CFG06", "CFG08")
    assert refused(recipe("x = " + "[" * 20_000 + "]" * 20_000)).code in ("CFG06", "CFG08")


@pytest.mark.parametrize(
    "text",
    ["a." * 20_000 + "a = 1", "[" + "a . " * 20_000 + "a]", "x = {" + "'a'." * 20_000 + "a = 1}"],
    ids=["key", "table", "inline table"],
)
def test_a_key_of_thousands_of_parts_is_refused_before_the_parser_takes_their_square(recipe, refused, text):
    error = refused(recipe("seed = 1\n" + text))
    assert (error.code, error.where) == ("CFG08", "recipe.toml:2")


def test_long_texts_are_no_keys(recipe):
    for text in ("a" * 500_000, "a." * 250_000, "a . " * 120_000, '"a' * 200_000):
        assert read_recipe(recipe(f"name = '''{text}'''")).data["name"] == text


def test_an_unset_variable_is_named_and_no_other_variable_is_shown(recipe, refused, monkeypatch):
    monkeypatch.setenv("CANARY_ELSEWHERE", "canary-7316")
    monkeypatch.delenv("MY_RUN_NAME", raising=False)
    error = refused(recipe('seed = 1\nname = "${MY_RUN_NAME}"\n'))
    assert (error.code, error.where) == ("CFG09", "recipe.toml:2")
    assert "MY_RUN_NAME" in error.what
    assert "export MY_RUN_NAME=" in error.fix
    assert "canary-7316" not in str(error)


def test_every_unset_variable_is_named_at_once(recipe, refused, monkeypatch):
    for name in ("FIRST_ONE", "SECOND_ONE"):
        monkeypatch.delenv(name, raising=False)
    error = refused(recipe('name = "${FIRST_ONE}"\n[report]\nledger_dir = "${SECOND_ONE}"\n'))
    assert "FIRST_ONE" in error.why
    assert "SECOND_ONE" in error.why
    assert error.where == "recipe.toml:1, recipe.toml:3"


def test_variables_are_replaced_and_a_doubled_dollar_stays_text(recipe, monkeypatch):
    monkeypatch.setenv("WHO", "ada")
    config = load_config(recipe('name = "by-${WHO}"\n[report]\nledger_dir = "$${WHO} costs $5"\n'))
    assert config.name == "by-ada"
    assert config.report.ledger_dir == "${WHO} costs $5"


def test_a_reference_that_is_no_name_is_refused(recipe, refused):
    assert refused(recipe('name = "${A B}"\n')).code == "CFG09"


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        pytest.param(0, "slime config check", id="older"),
        pytest.param(99, "update slime", id="newer"),
    ],
)
def test_another_schema_version_is_refused_before_anything_else(recipe, refused, version, fix):
    error = refused(recipe(f"nonsense = 1\nschema_version = {version}\n"))
    assert (error.code, error.where) == ("CFG11", "recipe.toml:2")
    assert f"schema version {version}" in error.what
    assert fix in error.fix


@pytest.mark.parametrize("literal", ["nan", "inf", "-inf", "+nan", "1e400", "-1e999"])
@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        pytest.param("[train]\nlr = {}\n", "train.lr", 2, id="core key"),
        pytest.param("[plugin.any]\n\nx = [1.0, {}]\n", "plugin.any.x[1]", 3, id="array of a plugin"),
        pytest.param("[[stage]]\nname = 'a'\nlr = {}\n", "stage[0].lr", 3, id="stage"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(recipe, refused, literal, text, key, line):
    error = refused(recipe(text.format(literal)))
    assert error.code == "CFG15"
    assert key in error.what
    assert error.where == f"recipe.toml:{line}"


def test_every_number_that_is_not_finite_is_named_before_types_are_judged(recipe, refused):
    error = refused(recipe("[train]\nlr = 'x'\nclip_grad = nan\n[plugin.a]\nb = inf\n"))
    assert error.what == "2 problems in the configuration"
    assert error.where == "recipe.toml:3, recipe.toml:5"


def test_open_spaces_refuse_numbers_that_are_not_finite_on_the_command_line(recipe, refused):
    error = refused(recipe(), "plugin.any.ratio=inf")
    assert (error.code, error.where) == ("CFG15", "command line: plugin.any.ratio")


@pytest.mark.parametrize("literal", ["nan", "inf", "-inf", "1e400"])
def test_flags_refuse_numbers_that_are_not_finite(recipe, refused, literal):
    error = refused(recipe(), f"--lr={literal}")
    assert (error.code, error.where) == ("CFG15", "command line: --lr")


def test_a_line_with_a_secret_is_not_quoted(recipe, refused):
    error = refused(recipe('[plugin.judge]\napi_key = "super-canary-secret\n'))
    assert error.code == "CFG06"
    assert "super-canary" not in str(error)


def test_what_is_loaded_says_where_it_came_from(recipe):
    loaded = read(recipe("seed = 4\n"), ["--lr", "0.5"])
    assert loaded.recipe is not None
    assert loaded.origins.of(("seed",)) == "recipe.toml:1"
    assert loaded.origins.of(("train", "lr")) == "command line: --lr"
    assert loaded.origins.of(("train", "clip_grad")) == ""


def test_runs_of_earlier_versions_have_their_trackers_keys_moved(recipe):
    assert read_recipe(recipe("[report]\nuse_wandb = false\nwandb_project = 'old'\n")).data == {"report": {}}
    moved = read_recipe(recipe("[report]\nsave_keep = 3\nuse_wandb = true\nwandb_project = 'old'\n"))
    assert moved.data == {
        "report": {"save_keep": 3},
        "plugin": {"trackers": {"use_wandb": True, "wandb_project": "old"}},
    }


def test_slots_of_stages_are_forgotten_in_runs_of_earlier_versions_and_refused_elsewhere(recipe, refused):
    file = recipe('[[stage]]\nname = "a"\nrollout_slots = 8\n[stage.rollout]\nrollout_slots = 9\n')
    assert refused(file).code == "CFG04"
    (file.parent / "run.json").write_text("{}")
    assert load_config(file).stage == ({"name": "a", "rollout": {}},)
