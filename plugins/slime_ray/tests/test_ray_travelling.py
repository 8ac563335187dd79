"""What travels to machines that lack it: wheels are read, compared with what is loaded, and laid out as pip would."""

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.config.sections.cluster import ClusterSection
from slime_core.errors import ConfigError
from slime_ray.channel import _path
from slime_ray.travelling import check_travelling, read_wheel, travelling

pytestmark = pytest.mark.unit


def write_wheel(folder, name="dist-mine", version="1.0", plugins=("mine",), **files):
    """A wheel of a plugin, as a build tool would write it; ``files`` are of its `.data` folder, by scheme."""
    base = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{base}-py3-none-any.whl"
    lines = "".join(f"{plugin} = mine_module\n" for plugin in plugins)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mine_module/__init__.py", "")
        archive.writestr("mine_module/inner.py", "x = 1\n")
        archive.writestr(f"{base}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{base}.dist-info/entry_points.txt", f"[console_scripts]\nx = a:b\n[slime.plugins]\n{lines}")
        for scheme, file in files.items():
            archive.writestr(f"{base}.data/{scheme}/{file}", "")
    return path


def config_of(*paths, **env):
    return Config(cluster=ClusterSection(ray_py_modules=tuple(map(str, paths)), ray_env_vars=env))


def test_a_wheel_tells_its_distribution_and_plugins(tmp_path):
    wheel = read_wheel(write_wheel(tmp_path))
    assert (wheel.name, wheel.version, wheel.plugins) == ("dist-mine", "1.0", {"mine": "mine_module"})


def test_a_file_that_is_no_wheel_is_refused_with_its_name(tmp_path):
    text, empty = tmp_path / "a.whl", tmp_path / "b.whl"
    text.write_text("no zip")
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme", "")
    for path, why in ((text, "not a zip file"), (empty, "0 .dist-info folders")):
        with pytest.raises(ConfigError, match=why) as told:
            read_wheel(path)
        assert told.value.code == "CFG19"
        assert str(path) in told.value.where


def test_a_wheel_is_laid_out_as_pip_would_and_gone_afterwards(tmp_path):
    wheel = write_wheel(tmp_path, purelib="beside.py", scripts="tool", headers="x.h")
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    with travelling(config_of(wheel, package, A="1")) as env:
        assert env["env_vars"] == {"A": "1"}
        *modules, last = env["py_modules"]
        assert last == str(package)
        assert [Path(path).name for path in modules] == ["beside.py", "dist_mine-1.0.dist-info", "mine_module"]
        assert (Path(modules[2]) / "inner.py").read_text() == "x = 1\n"
    assert not Path(modules[2]).exists()
    with travelling(Config()) as env:
        assert env == {}


def test_a_plugin_must_be_the_one_that_is_loaded(tmp_path, install_plugin):
    install_plugin("mine", "")
    loaded = SimpleNamespace(names=("mine",))
    wheel = write_wheel(tmp_path, plugins=("mine", "other"))
    assert check_travelling(config_of(wheel), loaded) == [
        f"notice: {wheel.name} contains the plugin other, which the run does not use",
        "plugins that travel: mine",
    ]
    with pytest.raises(ConfigError, match=r"dist-mine==2\.0 is in the wheel, dist-mine==1\.0 is installed") as told:
        check_travelling(config_of(write_wheel(tmp_path, version="2.0")), loaded)
    assert told.value.code == "CFG19"


def test_paths_are_checked_and_made_absolute_with_the_recipe(tmp_path):
    wheel = write_wheel(tmp_path)
    recipe = tmp_path / "r.toml"

    def read(text):
        recipe.write_text(f"[cluster]\ncluster_backend = 'ray'\nray_py_modules = ['{text}']\n")
        return load_config(recipe).cluster.ray_py_modules

    assert read(wheel.name) == (str(wheel),)
    with pytest.raises(ConfigError, match="CFG05"):
        read("gone.whl")
    with pytest.raises(ConfigError, match=r"CFG03.*takes wheels and package folders"):
        read("r.toml")


def test_modules_of_a_host_come_before_those_of_the_driver(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"/travelled{os.pathsep}/both")
    assert _path({"PYTHONPATH": f"/both{os.pathsep}/driver"}) == {
        "PYTHONPATH": os.pathsep.join(["/travelled", "/both", "/driver"])
    }
    monkeypatch.delenv("PYTHONPATH")
    assert _path({}) == {}
