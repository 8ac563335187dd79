"""The plugin `compat` as the core and `slime doctor` meet it."""

import pytest

from slime_compat.finder import Finder
from slime_compat.plugin import check_modules
from slime_compat.server import GenerateServer
from slime_core.compat.modules import server, slime_modules
from slime_core.plugins.load import load_plugin

pytestmark = pytest.mark.unit


def test_the_core_finds_modules_and_server_by_name():
    modules = slime_modules()
    modules.remove()
    assert isinstance(modules, Finder)
    assert isinstance(server("args.sglang_router_ip", {}), GenerateServer)
    assert set(load_plugin("compat").hooks) == {"slime_checks", "slime_command"}


def test_doctor_says_whether_a_package_named_slime_is_in_the_way(tmp_path, monkeypatch):
    assert check_modules().status == "ok"
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    result = check_modules()
    assert (result.status, str(tmp_path) in result.found) == ("warn", True)
    assert result.fix.startswith("pip uninstall slime")
