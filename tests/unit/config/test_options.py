"""A plugin's own table: bare flags reach it, its defaults fill it, its errors are as good as the core's."""

from pathlib import Path

import pytest
from pydantic import BaseModel, Field, model_validator

from slime_core.config.dump import to_toml
from slime_core.config.load import read, stages
from slime_core.config.validate import validate_options
from slime_core.errors import ConfigError

pytestmark = pytest.mark.unit


class Options(BaseModel):
    digits: int = Field(2, ge=1, le=3, description="How many.")
    ratio: float = 0.5
    names: tuple[str, ...] = ("a",)
    strict: bool = False
    table: Path | None = None
    gamma: float = 1.0
    seq_length: int = 0


class Contrary(BaseModel):
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}; nothing lies between")
        return self


class Other(BaseModel):
    digits: int = 1
    level: int


MODELS = {"calc": Options, "other": Other, "bare": None, "contrary": Contrary}


def models(names):
    return {name: MODELS[name] for name in names}


def load(path, *flags):
    return read(path, flags, models=models)


def test_plugin_defaults_stand_below_recipe_and_flags_and_are_written_out(recipe):
    path = recipe("plugins = ['calc']\n[plugin.calc]\nratio = 0.25\ndigits = 1\n")
    config = load(path, "--digits", "3").config
    assert config.plugin["calc"] == {
        "digits": 3,
        "ratio": 0.25,
        "names": ["a"],
        "strict": False,
        "gamma": 1.0,
        "seq_length": 0,
    }
    again = load(recipe(to_toml(config), name="config.toml")).config
    assert again == config


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        pytest.param(["--digits", "3"], "digits", 3, id="bare flag"),
        pytest.param(["plugin.calc.digits=3"], "digits", 3, id="full key"),
        pytest.param(["--plugin.calc.digits", "3"], "digits", 3, id="full key as flag"),
        pytest.param(["--ratio=1"], "ratio", 1.0, id="number"),
        pytest.param(["--strict"], "strict", True, id="bool"),
        pytest.param(["--no-strict"], "strict", False, id="no bool"),
        pytest.param(['plugin.calc.names=["x", "y"]'], "names", ["x", "y"], id="array"),
        pytest.param(["plugin.calc.names=x"], "names", ["x"], id="one element"),
    ],
)
def test_flags_reach_plugin_options_typed_by_the_model(recipe, flags, key, value):
    config = load(recipe("plugins = ['calc']\n"), *flags).config
    assert config.plugin["calc"][key] == value
    assert type(config.plugin["calc"][key]) is type(value)


def test_a_core_key_wins_a_bare_flag(recipe):
    assert load(recipe("plugins = ['calc']\n"), "--lr", "0.5").config.train.lr == 0.5


def test_a_bare_flag_that_two_plugins_know_names_both_full_keys(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['calc', 'other']\n[plugin.other]\nlevel = 1\n"), "--digits", "3")
    error = caught.value
    assert (error.code, error.where) == ("CFG01", "command line: --digits")
    assert "plugin.calc.digits or plugin.other.digits" in error.what
    assert "plugin.other.digits=3" in error.fix


def test_a_bare_flag_that_a_plugin_and_megatron_know_names_both_full_keys(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['calc']\n"), "--seq-length", "9")
    assert "plugin.calc.seq_length or megatron.seq_length" in caught.value.what
    assert "megatron.seq_length=9" in caught.value.fix


def test_a_bare_flag_that_only_megatron_knows_goes_there(recipe):
    config = load(recipe(), "--num-layers", "4").config
    assert config.megatron == {"num_layers": 4}


def test_open_spaces_take_typed_values(recipe):
    config = load(recipe(), "megatron.num_layers=4", "sglang.mem_fraction_static=0.5", "sglang.log_level=warn").config
    assert config.megatron == {"num_layers": 4}
    assert config.sglang == {"mem_fraction_static": 0.5, "log_level": "warn"}


@pytest.mark.parametrize(
    ("table", "code", "what", "fix"),
    [
        pytest.param("digit = 1", "CFG01", "unknown key 'plugin.calc.digit'", "plugin.calc.digits'?", id="unknown"),
        pytest.param("digits = '2'", "CFG02", 'plugin.calc.digits = "2"', "without quotes: 2", id="text"),
        pytest.param("digits = true", "CFG02", "plugin.calc.digits = true", "write 1", id="bool"),
        pytest.param("digits = 4", "CFG03", "plugin.calc.digits = 4", "<= 3", id="range"),
        pytest.param("names = [1]", "CFG02", "plugin.calc.names[0] = 1", "a string", id="element"),
        pytest.param("ratio = inf", "CFG15", "plugin.calc.ratio", "finite", id="inf"),
    ],
)
def test_wrong_options_are_refused_with_file_and_line(recipe, table, code, what, fix):
    with pytest.raises(ConfigError) as caught:
        load(recipe(f"plugins = ['calc']\n[plugin.calc]\n{table}\n"))
    error = caught.value
    assert (error.code, error.where) == (code, "recipe.toml:3")
    assert what in error.what
    assert fix in error.fix


def test_what_a_plugins_own_validator_refuses_is_told_in_its_words(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['contrary']\n[plugin.contrary]\nlow = 3\n"), "--high", "2")
    error = caught.value
    assert (error.code, error.what) == ("CFG04", "plugin.contrary: low = 3 is above high = 2")
    assert (error.why, error.fix) == ("nothing lies between", "change what it names in [plugin.contrary]")


def test_a_required_option_that_is_missing_is_named(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['other']\n"))
    assert caught.value.code == "CFG02"
    assert "plugin.other.level is missing" in caught.value.what
    assert "an integer" in caught.value.fix


def test_core_and_plugin_problems_are_named_together(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['calc']\n[plugin.calc]\ndigits = 9\n[train]\nlr = -1.0\n"))
    assert "plugin.calc.digits = 9" in caught.value.why
    assert "train.lr = -1.0" in caught.value.why


def test_a_plugin_without_options_takes_no_table(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe("plugins = ['bare']\n[plugin.bare]\nx = 1\n"))
    assert "unknown key 'plugin.bare.x'" in caught.value.what


def test_path_options_of_a_recipe_start_at_its_folder(recipe, tmp_path):
    config = load(recipe("plugins = ['calc']\n[plugin.calc]\ntable = 'words.txt'\n")).config
    assert config.plugin["calc"]["table"] == str(tmp_path / "words.txt")


def test_a_stage_may_change_plugin_options_and_is_checked(recipe):
    text = "plugins = ['calc']\n[[stage]]\nname = 'a'\n[stage.plugin.calc]\ndigits = {}\n"
    (stage,) = stages(load(recipe(text.format(3))).config)
    assert stage.plugin["calc"]["digits"] == 3
    with pytest.raises(ConfigError) as caught:
        load(recipe(text.format(9)))
    assert (caught.value.code, caught.value.where) == ("CFG03", "recipe.toml:5")


def test_a_table_is_validated_alone_for_the_plugin_loader():
    filled = validate_options("calc", Options, {"digits": 3})
    assert isinstance(filled, Options)
    assert filled.digits == 3
    with pytest.raises(ConfigError) as caught:
        validate_options("calc", Options, {"digits": "3", "nope": 1})
    assert "2 problems" in caught.value.what
