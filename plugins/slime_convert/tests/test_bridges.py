"""The claim hook: the first plugin with a bridge for a config, and an error that says who was asked for what."""

from types import SimpleNamespace

import pytest

from slime_convert.bridges import find_bridge
from slime_core import ConfigError, PluginError
from slime_core.plugins import load_plugin

pytestmark = pytest.mark.unit

BRIDGE = """
class Bridge:
    def __init__(self, family): self.family = family
    def entries(self, config): return []
    def megatron(self, config): return {}
    def sizes(self, config, multiple=1): return None

slime_families = ("mine", "theirs")

@slime_core.hookimpl
def slime_model_bridge(hf_config):
    return Bridge("MARK " + hf_config.model_type) if hf_config.model_type in FAMILIES else None
"""


@pytest.fixture
def load(install_plugin):
    """Install plugins given as name=source, and load them."""

    def load(**sources):
        for name, source in sources.items():
            install_plugin(name, "import slime_core\n" + source)
        return [load_plugin(name) for name in sources]

    return load


def claiming(mark, *families):
    return BRIDGE.replace("MARK", mark).replace("FAMILIES", repr(families))


def config(family):
    return SimpleNamespace(model_type=family, architectures=[f"{family.title()}ForCausalLM"])


def test_plugins_are_asked_in_turn_and_the_first_bridge_is_taken(load):
    plugins = load(deaf="", one=claiming("one", "mine"), two=claiming("two", "mine", "theirs"))
    assert find_bridge(plugins, config("mine")).family == "one mine"
    assert find_bridge(plugins, config("theirs")).family == "two theirs"


def test_an_architecture_without_a_bridge_is_named_with_all_that_are_known(load):
    plugins = load(one=claiming("one", "mine", "theirs"))
    with pytest.raises(
        ConfigError, match=r"no plugin has a bridge for TheirForCausalLM \(model_type 'their'\)"
    ) as error:
        find_bridge(plugins, config("their"))
    assert error.value.code == "CFG200"
    assert "one (" in error.value.why
    assert "families: mine, theirs" in error.value.why
    assert "did you mean 'theirs'?" in error.value.fix


def test_a_family_that_is_refused_by_name_says_why(load):
    with pytest.raises(ConfigError, match="qwen3_vl_moe") as error:
        find_bridge(load(one=claiming("one", "mine")), config("qwen3_vl_moe"))
    assert "each matrix transposed" in error.value.why
    assert 'train_backend = "fsdp"' in error.value.fix


def test_without_a_plugin_of_bridges_the_error_says_which_to_load(load):
    with pytest.raises(ConfigError, match="no plugin has a bridge for") as error:
        find_bridge(load(deaf=""), config("qwen3"))
    assert "--plugin models" in error.value.fix


def test_a_plugin_that_returns_no_bridge_is_named(load):
    source = "@slime_core.hookimpl\ndef slime_model_bridge(hf_config): return 'qwen3'\n"
    with pytest.raises(PluginError, match="returned a str") as error:
        find_bridge(load(wrong=source), config("qwen3"))
    assert error.value.code == "PLG57"
