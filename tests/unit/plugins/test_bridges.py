"""The claim hook: the first plugin with a bridge for a config, and an error that says who was asked for what."""

from types import SimpleNamespace

import pytest

from slime_core import ConfigError, PluginError

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


def claiming(mark, *families):
    return BRIDGE.replace("MARK", mark).replace("FAMILIES", repr(families))


def config(family):
    return SimpleNamespace(model_type=family, architectures=[f"{family.title()}ForCausalLM"])


def test_plugins_are_asked_in_turn_and_the_first_bridge_is_taken(load):
    plugins = load(deaf="", one=claiming("one", "mine"), two=claiming("two", "mine", "theirs"))
    assert plugins.bridge(config("mine")).family == "one mine"
    assert plugins.bridge(config("theirs")).family == "two theirs"


def test_an_architecture_without_a_bridge_is_named_with_all_that_are_known(load):
    plugins = load(one=claiming("one", "mine", "theirs"))
    with pytest.raises(
        ConfigError, match=r"no plugin has a bridge for TheirForCausalLM \(model_type 'their'\)"
    ) as error:
        plugins.bridge(config("their"))
    assert error.value.code == "CFG200"
    assert "one (" in error.value.why
    assert "families: mine, theirs" in error.value.why
    assert "did you mean 'theirs'?" in error.value.fix


def test_without_a_plugin_of_bridges_the_error_says_which_to_load(load):
    with pytest.raises(ConfigError, match="no plugin has a bridge for") as error:
        load(deaf="").bridge(config("qwen3"))
    assert "--plugin models" in error.value.fix


def test_what_is_no_bridge_is_the_plugin_s_fault(load):
    source = "@slime_core.hookimpl\ndef slime_model_bridge(hf_config): return 'qwen3'\n"
    with pytest.raises(PluginError, match="returned a str") as error:
        load(wrong=source).bridge(config("qwen3"))
    assert error.value.code == "PLG57"
