"""Engines, trainers and clusters of plugins: found by name, with a table and flags; what is wrong with one is named."""

import asyncio

import pytest

from slime_core import ConfigError, PluginError
from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.plugins import backends, discover, load_plugins, option_models
from slime_core.plugins.backends import cluster_of, engine_of, trainer_of

pytestmark = pytest.mark.unit

ENGINE = """
from contextlib import asynccontextmanager
import pydantic
import slime_core
from slime_core.backends import EngineBackend

class Section(pydantic.BaseModel, extra="forbid"):
    url: str = "http://here.example"
    retries: int = pydantic.Field(2, ge=0)

@asynccontextmanager
async def start(start):
    yield start

@slime_core.hookimpl
def slime_engine():
    return [EngineBackend(name="NAME", section=Section, start=start)]
"""


def engine(name, old="", new=""):
    assert old in ENGINE
    return ENGINE.replace(old, new).replace("NAME", name) if old else ENGINE.replace("NAME", name)


def load(*flags, recipe=None):
    return load_config(recipe, flags, models=option_models)


def refused(kind, *flags, recipe=None):
    with pytest.raises(kind) as caught:
        load_plugins(load(*flags, recipe=recipe))
    return caught.value


def test_an_installed_backend_is_found_by_its_name_with_its_table_and_flags(install_plugin):
    install_plugin("far_engine", engine("far_engine"))
    config = load("--rollout-engine", "far_engine", "--far-engine-url", "http://there.example", "far_engine.retries=3")
    assert config.table("far_engine") == {"url": "http://there.example", "retries": 3}
    assert engine_of(config).name == "far_engine"


@pytest.mark.parametrize("prefix", ["--far-engine-", "far_engine."], ids=["flag", "key"])
def test_a_backend_in_a_file_has_a_table_and_flags_too(tmp_path, prefix):
    """The recipe names the file, so the command line knows no table when it is split."""
    (tmp_path / "mine.py").write_text(engine("far_engine"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('plugins = ["mine.py"]\nrollout.rollout_engine = "far_engine"\n[far_engine]\nretries = 5\n')
    words = ["--far-engine-url", "12"] if prefix == "--far-engine-" else ["far_engine.url=12"]
    config = load(*words, recipe=recipe)
    assert config.table("far_engine") == {"retries": 5, "url": "12"}, "the model says what a value is"
    assert engine_of(config).name == "far_engine"


@pytest.mark.parametrize(
    ("table", "code", "words"),
    [
        ("ulr = 'x'", "CFG01", ["far_engine.ulr", "did you mean 'far_engine.url'?"]),
        ("url = 3", "CFG02", ["far_engine.url"]),
        ("retries = -1", "CFG03", ["far_engine.retries"]),
    ],
    ids=["misspelt key", "wrong type", "out of range"],
)
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_a_table_is_checked_by_its_model_with_file_and_line(install_plugin, tmp_path, table, code, words, used):
    install_plugin("far_engine", engine("far_engine"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[far_engine]\n{table}\n")
    error = refused(ConfigError, *(("--rollout-engine", "far_engine") if used else ()), recipe=recipe)
    assert (error.code, error.where) == (code, f"{recipe}:2")
    assert [word for word in words if word not in f"{error.what} {error.why} {error.fix}"] == []


def test_a_misspelt_table_gets_the_nearest_and_how_a_backend_comes(install_plugin, tmp_path):
    install_plugin("far_engine", engine("far_engine"))
    recipe = tmp_path / "recipe.toml"
    for name, near in (("sglng", "sglang"), ("far_engin", "far_engine")):
        recipe.write_text(f"[{name}]\nx = 1\n")
        error = refused(ConfigError, recipe=recipe)
        assert (error.code, error.what, error.where) == ("CFG01", f"unknown key '{name}'", f"{recipe}:1")
        assert f"did you mean '{near}'?" in error.fix
        assert "slime plugins list" in error.fix


@pytest.mark.parametrize(
    ("flag", "right"),
    [("--sglng-mem-fraction-static", "--sglang-mem-fraction-static"), ("--far-engne-url", "--far-engine-url")],
)
def test_a_misspelt_flag_of_a_backend_gets_the_nearest(install_plugin, flag, right):
    install_plugin("far_engine", engine("far_engine"))
    error = refused(ConfigError, flag, "1")
    assert error.code == "CFG01"
    assert f"did you mean {right}?" in error.fix


def test_a_table_of_a_backend_that_is_not_installed_is_refused_where_nobody_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "is_installed", lambda _: False)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[sglang]\nmem_fraction_static = 0.2\n")
    error = refused(ConfigError, recipe=recipe)
    assert (error.code, error.where) == ("CFG04", f"{recipe}:1")
    assert "nobody reads [sglang]: slime-sglang" in error.what
    assert error.fix.startswith("pip install -e plugins/slime_sglang")
    assert "leave [sglang] out" in error.fix


def test_a_name_that_nobody_brings_says_that_a_package_may(install_plugin):
    error = refused(ConfigError, "--rollout-engine", "somebodys")
    assert (error.code, error.where) == ("CFG04", "command line: --rollout-engine")
    assert "slime plugins list" in error.fix


@pytest.mark.parametrize(
    ("hook", "kind", "name"),
    [
        ("slime_engine", "EngineBackend", "local"),
        ("slime_trainer", "TrainerBackend", "fsdp"),
        ("slime_cluster", "ClusterBackend", "local"),
    ],
)
def test_a_plugin_that_brings_a_name_of_the_core_is_refused(install_plugin, hook, kind, name):
    more = {"EngineBackend": "", "TrainerBackend": ", trainer=object", "ClusterBackend": ", start=object"}[kind]
    install_plugin(
        "taken",
        f"import slime_core\nfrom slime_core.backends import {kind}\n@slime_core.hookimpl\n"
        f"def {hook}():\n    return [{kind}(name={name!r}{more})]\n",
    )
    error = refused(PluginError, "--plugin", "taken")
    assert (error.code, error.where) == ("PLG52", backends.KEYS[hook])
    assert f"{name} is provided by slime-rl and by dist-taken==1.0" in error.what


def test_two_plugins_of_a_run_that_bring_one_name_are_both_named(install_plugin):
    install_plugin("one", engine("same"))
    install_plugin("other", engine("same"))
    error = refused(PluginError, "--plugin", "one", "--plugin", "other")
    assert error.code == "PLG52"
    assert "same is provided by dist-one==1.0 and by dist-other==1.0" in error.what
    assert "load one of the two" in error.fix


def test_an_installed_backend_and_one_of_a_run_s_plugin_are_both_named(install_plugin):
    install_plugin("same", engine("same"))
    install_plugin("other", engine("same"))
    error = refused(PluginError, "--plugin", "other", "--rollout-engine", "same")
    assert error.code == "PLG52"
    assert "dist-other==1.0 and by dist-same==1.0" in error.what


def test_two_distributions_of_one_backend_are_both_named_where_a_key_names_it(install_plugin):
    install_plugin("twin", engine("twin"), distribution="slime-twin")
    install_plugin("twin", engine("twin"), distribution="other-twin")
    error = refused(PluginError, "--rollout-engine", "twin")
    assert (error.code, error.where) == ("PLG52", "rollout.rollout_engine, plugin 'twin'")
    assert "slime-twin==1.0" in error.what
    assert "other-twin==1.0" in error.what
    assert "pip uninstall slime-twin" in error.fix


BROKEN = [
    ("import no_such_package", "PLG50", "pip install no_such_package"),
    ("slime_api = 99", "PLG55", "a version of dist-broken"),
    (engine("broken", "return [", "raise ValueError('no'); return ["), "PLG56", ""),
    (engine("broken", "return [", "return 3, ["), "PLG57", "return a list of slime_core.backends.EngineBackend"),
]
NAMES = ["import", "API", "hook raises", "hook returns"]


@pytest.mark.parametrize(("source", "code", "fix"), BROKEN, ids=NAMES)
def test_a_broken_backend_that_a_key_names_is_an_error_with_package_and_key(install_plugin, source, code, fix):
    install_plugin("broken", source)
    error = refused(PluginError, "--rollout-engine", "broken")
    assert error.code == code
    assert "rollout.rollout_engine" in error.where
    assert "rollout.rollout_engine = broken" in error.what
    assert "broken" in error.what
    assert fix in error.fix


@pytest.mark.parametrize(("source", "code", "fix"), BROKEN, ids=NAMES)
def test_a_table_or_flag_of_a_broken_backend_says_why_nobody_reads_it(install_plugin, tmp_path, source, code, fix):
    install_plugin("broken", source)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[broken]\nurl = 'x'\n")
    for error in (refused(ConfigError, recipe=recipe), refused(ConfigError, "--broken-url", "x")):
        assert error.code == "CFG01"
        assert "plugin 'broken' does not load" in f"{error.what} {error.why}"
        assert fix in error.fix


@pytest.mark.parametrize(("source", "code", "fix"), BROKEN, ids=NAMES)
def test_a_broken_backend_does_not_touch_a_run_without_it(install_plugin, source, code, fix):
    install_plugin("broken", source)
    config = load("--lr", "1e-4", "--sglang-mem-fraction-static", "0.5")
    assert (engine_of(config).name, trainer_of(config).name, cluster_of(config).name) == ("local", "fsdp", "local")


@pytest.mark.parametrize(
    "where", ["yield start", "async def start(start):"], ids=["in the block's first half", "called"]
)
def test_a_backend_that_fails_in_start_names_package_key_and_line(install_plugin, where):
    text = "raise RuntimeError('no server'); yield" if where == "yield start" else "async def start():"
    install_plugin("far_engine", engine("far_engine", where, text))

    async def begin():
        async with engine_of(Config(rollout={"rollout_engine": "far_engine"})).start(None):
            pass

    with pytest.raises(PluginError) as caught:
        asyncio.run(begin())
    error = caught.value
    assert error.code == "PLG56"
    assert error.what.startswith("rollout.rollout_engine = far_engine: dist-far_engine==1.0 failed in `start`: ")
    assert error.where.startswith("rollout.rollout_engine, ")
    assert error.fix.startswith("slime plugins check far_engine")


def test_what_a_run_raises_inside_a_backend_passes_as_it_is(install_plugin):
    install_plugin("far_engine", engine("far_engine"))

    async def begin():
        async with engine_of(Config(rollout={"rollout_engine": "far_engine"})).start(None):
            raise KeyError("the run's own")

    with pytest.raises(KeyError):
        asyncio.run(begin())


def test_a_backend_whose_library_is_missing_is_refused_with_what_is_missing(install_plugin):
    install_plugin("far_engine", engine("far_engine", "section=Section", 'library="far.away"'))
    error = refused(ConfigError, "--rollout-engine", "far_engine")
    assert (error.code, error.what) == ("CFG04", "rollout_engine = far_engine, but far.away is not installed here")
    assert error.fix == "pip install the package of far.away   or leave rollout_engine out"


def test_a_backend_is_asked_for_once_while_nothing_else_is_installed(install_plugin):
    install_plugin("far_engine", engine("far_engine"))
    config = load("--rollout-engine", "far_engine")
    first = engine_of(config)
    assert engine_of(config) is first
    install_plugin("other", engine("other"))
    assert engine_of(load("--rollout-engine", "other")).name == "other"


def test_another_package_that_is_called_buffer_is_named_where_a_buffer_is_wanted(install_plugin, monkeypatch):
    entries = discover._entries
    monkeypatch.setattr(discover, "_entries", lambda: (entry for entry in entries() if entry[2] != "slime-buffer"))
    install_plugin("buffer", "slime_api = 1\n")
    with pytest.raises(PluginError, match=r"'buffer' is dist-buffer==1\.0, not slime-buffer") as caught:
        load_plugins(Config(rollout={"rollout_buffer_url": "http://127.0.0.1:9"}))
    assert caught.value.code == "PLG52"
