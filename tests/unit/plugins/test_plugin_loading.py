"""Each plugin of a run is imported and checked on its own; what is wrong is said with its name and place."""

import pytest

from slime_core.config.schema import Config
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins import load_plugin, load_plugins, recipe_path

pytestmark = pytest.mark.unit

GOOD = (
    "import slime_core\n@slime_core.hookimpl\ndef slime_reward(group, ctx):\n    return [1.0 for s in group.samples]\n"
)


def refused(name):
    with pytest.raises(PluginError) as caught:
        load_plugin(name)
    assert caught.value.exit_code == 4
    return caught.value


def test_a_missing_module_is_named_with_plugin_and_distribution(install_plugin):
    install_plugin("geo", "import no_such_package.part\n", distribution="slime-geo", version="0.3.1")
    error = refused("geo")
    assert error.code == "PLG50"
    assert "'geo' (slime-geo==0.3.1)" in error.what
    assert "module 'no_such_package' is missing" in error.what
    assert "geo_plugin_module.py:1" in error.where
    assert "pip install no_such_package" in error.fix


def test_a_syntax_error_is_told_with_file_and_line(install_plugin):
    install_plugin("geo", "x = 1\ndef broken(:\n")
    error = refused("geo")
    assert error.code == "PLG50"
    assert error.where.endswith("geo_plugin_module.py:2")
    assert "SyntaxError" in error.what


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "raise KeyboardInterrupt", "1 / 0"])
def test_whatever_an_import_raises_stays_an_error_of_that_plugin(install_plugin, line):
    install_plugin("geo", f"\n\n{line}\n")
    error = refused("geo")
    assert error.code == "PLG50"
    assert error.where.endswith("geo_plugin_module.py:3")


def test_a_broken_plugin_takes_no_other_with_it(install_plugin):
    install_plugin("broken", "1 / 0")
    install_plugin("good", GOOD)
    assert refused("broken").code == "PLG50"
    assert load_plugins(Config(plugins=("good",))).names == ("good",)


def test_a_hook_that_asks_for_unknown_arguments_is_shown_the_right_signature(install_plugin):
    install_plugin("geo", GOOD.replace("(group, ctx)", "(groups, ctx, tokenizer)"))
    error = refused("geo")
    assert error.code == "PLG53"
    assert "groups, tokenizer" in error.what
    assert "slime_reward(group, ctx)" in error.fix
    assert "geo_plugin_module.py:2" in error.where


def test_arguments_may_be_left_out_and_come_in_any_order(install_plugin):
    install_plugin("geo", GOOD.replace("(group, ctx)", "(ctx, group)"))
    install_plugin("short", GOOD.replace("(group, ctx)", "(group)"))
    assert set(load_plugin("geo").hooks) == set(load_plugin("short").hooks) == {"slime_reward"}


def test_a_misspelt_hook_is_refused_with_the_nearest_name(install_plugin):
    install_plugin("geo", GOOD.replace("slime_reward", "slime_rewards"))
    error = refused("geo")
    assert error.code == "PLG54"
    assert "did you mean 'slime_reward'?" in error.fix


def test_a_hook_without_its_decorator_is_refused(install_plugin):
    install_plugin("geo", "def slime_reward(group, ctx):\n    return []\n")
    error = refused("geo")
    assert error.code == "PLG54"
    assert "@slime_core.hookimpl" in error.fix


def test_another_api_version_is_refused_with_both(install_plugin):
    install_plugin("geo", "slime_api = 2\n" + GOOD)
    error = refused("geo")
    assert error.code == "PLG55"
    assert "API 2" in error.what
    assert "has 1" in error.what


@pytest.mark.parametrize(
    ("source", "hook"),
    [
        ("async def slime_sampling(prompt, ctx):\n    return ctx.sampling", "slime_sampling"),
        ("def slime_generate(group, ctx):\n    yield group", "slime_generate"),
        ("async def slime_reward(group, ctx):\n    yield 1.0", "slime_reward"),
    ],
    ids=["async where sync is called", "generator", "async generator"],
)
def test_a_hook_of_the_wrong_kind_of_function_is_refused_at_load(install_plugin, source, hook):
    install_plugin("geo", f"import slime_core\n@slime_core.hookimpl\n{source}\n")
    error = refused("geo")
    assert error.code == "PLG66"
    assert hook in error.what


def test_hook_wrappers_are_refused(install_plugin):
    install_plugin("geo", GOOD.replace("@slime_core.hookimpl", "@slime_core.hookimpl(wrapper=True)"))
    assert refused("geo").code == "PLG53"


def test_a_plugin_may_be_a_class(install_plugin):
    source = (
        "import slime_core\nclass Geo:\n    @slime_core.hookimpl\n"
        "    def slime_reward(self, group):\n        return [2.0 for s in group.samples]\nplugin = Geo\n"
    )
    site = install_plugin("geo", source)
    points = site / "dist_geo-1.0.dist-info" / "entry_points.txt"
    points.write_text("[slime.plugins]\ngeo = geo_plugin_module:plugin\n")
    assert set(load_plugin("geo").hooks) == {"slime_reward"}


def test_a_table_for_a_plugin_that_is_not_loaded_is_refused(install_plugin):
    install_plugin("geo", GOOD)
    with pytest.raises(ConfigError) as caught:
        load_plugins(Config(plugins=("geo",), plugin={"gel": {"x": 1}}))
    assert caught.value.code == "CFG01"
    assert "did you mean 'geo'?" in caught.value.fix


OPTIONS = GOOD + (
    "from pydantic import BaseModel\nclass Options(BaseModel, extra='forbid', frozen=True):\n    digits: int = 2\n"
    "@slime_core.hookimpl\ndef slime_options():\n    return Options\n"
)


def test_options_are_filled_and_reach_the_hook(load, ask):
    source = OPTIONS.replace("return [1.0", "return [float(ctx.options.digits)")
    plugins = load({"plugin": {"geo": {"digits": 5}}}, geo=source)
    assert plugins.options("geo").digits == 5
    assert [r.value for r in ask(plugins, "reward", plugins=("geo",), plugin={"geo": {"digits": 7}})] == [7.0, 7.0]


@pytest.mark.parametrize(
    ("table", "code"), [({"digit": 1}, "CFG01"), ({"digits": "two"}, "CFG02")], ids=["unknown key", "wrong type"]
)
def test_options_that_do_not_fit_are_config_errors(install_plugin, table, code):
    install_plugin("geo", OPTIONS)
    with pytest.raises(ConfigError) as caught:
        load_plugins(Config(plugins=("geo",), plugin={"geo": table}))
    assert caught.value.code == code
    assert "plugin.geo" in str(caught.value)


def test_a_recipe_is_found_by_plugin_and_name(install_plugin, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text("")
    source = GOOD + f"@slime_core.hookimpl\ndef slime_recipes():\n    return {{'small': {str(recipe)!r}}}\n"
    install_plugin("geo", source)
    assert recipe_path("geo", "small") == recipe
    with pytest.raises(ConfigError) as caught:
        recipe_path("geo", "smal")
    assert caught.value.code == "CFG05"
    assert "did you mean 'small'?" in caught.value.fix
