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
    assert "install the package that provides it" in caught.value.fix
    assert "pip install" not in caught.value.fix, "a package of that name would be a stranger's"
    assert "kernelbench" in caught.value.why


@pytest.mark.parametrize(
    ("entry_points", "meta"),
    [
        (b"[slime.plugins]\njunk line\n", b"Metadata-Version: 2.1\nName: a\nVersion: 1\n"),
        (b"[slime.plugins]\nx = y\n\xff\xfe", b"Metadata-Version: 2.1\nName: a\nVersion: 1\n"),
        (b"no section = x\n[slime.plugins", b""),
        (b"[console_scripts]\nbroken\n", None),
    ],
    ids=["no equals sign", "no UTF-8", "no metadata", "another group"],
)
def test_a_distribution_with_damaged_metadata_hides_no_other(install_plugin, entry_points, meta):
    site = install_plugin("geo", "")
    broken = site / "damaged-1.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(entry_points)
    if meta is not None:
        (broken / "METADATA").write_bytes(meta)
    assert "geo" in [info.name for info in available()]
    assert find("geo").distribution == "dist-geo"


def test_a_plugin_without_a_name_or_version_in_its_metadata_is_listed_as_unknown(install_plugin):
    site = install_plugin("geo", "")
    (site / "dist_geo-1.0.dist-info" / "METADATA").unlink()
    assert find("geo").requirement == "unknown==unknown"


@pytest.mark.parametrize("target", ["not a module!", "no_such_module_anywhere", "json:nothing", ""])
def test_a_target_that_is_none_is_a_load_error_of_that_plugin(install_plugin, target):
    from slime_core.plugins import load_plugin

    site = install_plugin("geo", "")
    (site / "dist_geo-1.0.dist-info" / "entry_points.txt").write_text(f"[slime.plugins]\ngeo = {target}\n")
    with pytest.raises(PluginError) as caught:
        load_plugin("geo")
    assert caught.value.code == "PLG50"
    assert "geo" in caught.value.what


def test_a_copy_further_down_the_path_is_not_listed(install_plugin, tmp_path, monkeypatch):
    import shutil

    site = install_plugin("geo", "", version="2.0")
    other = tmp_path / "older"
    shutil.copytree(site, other)
    (other / "dist_geo-2.0.dist-info").rename(other / "dist_geo-1.0.dist-info")
    meta = other / "dist_geo-1.0.dist-info" / "METADATA"
    meta.write_text(meta.read_text().replace("2.0", "1.0"))
    (other / "dist_geo-1.0.dist-info" / "entry_points.txt").write_text("[slime.plugins]\ngeo = older_module\n")
    monkeypatch.syspath_prepend(str(other))
    monkeypatch.syspath_prepend(str(site))
    assert [info.version for info in available() if info.name == "geo"] == ["2.0"]
