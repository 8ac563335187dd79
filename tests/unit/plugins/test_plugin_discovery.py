"""Installed plugins are told from metadata alone."""

import subprocess
import sys

import pytest

from slime_core.errors import PluginError
from slime_core.plugins import available, find

pytestmark = pytest.mark.unit


def test_a_plugin_is_listed_with_version_distribution_and_target(install_plugin):
    install_plugin("geo", "", distribution="slime-geo", version="0.3.1")
    (found,) = [info for info in available() if info.name == "geo"]
    assert (found.version, found.distribution, found.target) == ("0.3.1", "slime-geo", "geo_plugin_module")
    assert found.requirement == "slime-geo==0.3.1"
    assert found.conflicts == ()


def test_listing_imports_neither_plugins_nor_heavy_packages(install_plugin):
    site = install_plugin("loud", "raise RuntimeError('imported at list')")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from slime_core.plugins import available\n"
        "assert 'loud' in [info.name for info in available()]\n"
        "print([m for m in ('numpy', 'torch', 'pydantic', 'loud_plugin_module') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_two_distributions_of_one_name_are_both_listed_and_refused_by_name(install_plugin):
    install_plugin("twin", "", distribution="slime-twin")
    install_plugin("twin", "", distribution="other-twin", version="2.0")
    rows = [info for info in available() if info.name == "twin"]
    assert {row.distribution: row.conflicts for row in rows} == {
        "slime-twin": ("other-twin",),
        "other-twin": ("slime-twin",),
    }
    with pytest.raises(PluginError) as caught:
        find("twin")
    assert caught.value.code == "PLG52"
    assert "slime-twin==1.0" in str(caught.value)
    assert "other-twin==2.0" in str(caught.value)


def test_an_unknown_name_gets_the_nearest_and_a_pip_hint(install_plugin):
    install_plugin("kernelbench", "")
    with pytest.raises(PluginError) as caught:
        find("kernelbnch")
    assert caught.value.code == "PLG51"
    assert "did you mean 'kernelbench'?" in caught.value.fix
    assert "pip install slime-kernelbnch" in caught.value.fix
    assert "kernelbench" in caught.value.why
