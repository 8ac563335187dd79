"""Where servers live and the trainer listens for them, on this machine."""

import asyncio
import shutil

import pytest

from slime_core.clusters.host import LOOPBACK, elsewhere
from slime_core.config.load import load_config
from slime_core.errors import ConfigError
from slime_sglang import installation
from slime_sglang.host import LocalPlacements, own_address
from slime_sglang.installation import PYTHON_ENV

pytestmark = pytest.mark.unit


def here(*flags):
    return LocalPlacements(load_config(None, ["--hf-checkpoint", ".", "--device", "cpu", *flags]))


def test_servers_of_this_machine_listen_on_the_loopback_and_so_does_the_trainer():
    place = here()
    placement = place.server(3)
    assert placement.host is None
    assert (placement.address, dict(placement.env), place.gpus()) == (LOOPBACK, {}, None)
    assert place.trainer_address(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"]) == LOOPBACK


def test_the_trainer_listens_for_servers_elsewhere_at_the_address_from_which_it_reaches_them():
    assert elsewhere(["http://127.0.0.1:1", "https://127.0.0.1.example:2"]) == ("127.0.0.1.example", 2)
    assert elsewhere(["http://10.0.0.1"]) == ("10.0.0.1", 80)
    assert own_address("127.0.0.5", 9) == LOOPBACK  # the kernel answers: from there it is reached
    assert own_address("no such host", 9) == LOOPBACK
    found = here().trainer_address(["http://127.0.0.1:1", "http://10.0.0.1:30000"])
    assert found == own_address("10.0.0.1", 30000)


def test_the_driver_names_an_sglang_where_nothing_else_does(monkeypatch):
    monkeypatch.setattr(installation, "is_here", lambda: False)
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    asked = []
    monkeypatch.setattr(installation, "read_installation", lambda python, env: asked.append(python))
    shell = shutil.which("sh")
    installation.read_here({}, named="sh")
    installation.read_here({"python": "ls"}, named="sh")
    monkeypatch.setenv(PYTHON_ENV, "cat")
    installation.read_here({}, named="sh")
    assert asked == [shell, shutil.which("ls"), shutil.which("cat")]


def test_an_sglang_that_is_not_there_is_told_as_ever():
    with pytest.raises(ConfigError) as caught:
        asyncio.run(here().on_server("slime_sglang.installation:read_here", {"python": "/no/such/python"}))
    assert caught.value.code == "CFG05"
