"""What a service of a plugin stands on: its folder, its token, its socket."""

import os
import re
import socket

import pytest

from slime_core.errors import ConfigError, StorageError
from slime_service.address import Address, bind, find_token, locked

pytestmark = pytest.mark.unit


def address(folder, **more):
    return Address(folder=folder, token_env="A_TOKEN", **more)


def test_the_token_is_made_once_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    token, path = find_token(address(tmp_path))
    assert path == tmp_path / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)
    assert find_token(address(tmp_path)) == (token, path), "it survives a restart"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        find_token(address(tmp_path))
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        find_token(address(tmp_path))


def test_the_environments_token_is_taken_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "x" * 20)
    assert find_token(address(tmp_path)) == ("x" * 20, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_other_hosts_need_a_token_of_the_users_own(tmp_path, host):
    with pytest.raises(ConfigError, match="other machines"):
        find_token(address(tmp_path, host=host))
    own = tmp_path / "own"
    own.write_text("y" * 20)
    own.chmod(0o600)
    assert find_token(address(tmp_path, host=host, token_file=own))[0] == "y" * 20


def test_one_folder_has_one_service_and_a_taken_port_is_told(tmp_path):
    """The kernel's lock, and a socket that is bound and held."""
    with locked(tmp_path):
        with pytest.raises(StorageError) as held:
            with locked(tmp_path):
                pass
        assert held.value.code == "STO116"
    with locked(tmp_path):
        pass
    with bind(address(tmp_path)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be served"):
            bind(address(tmp_path, port=port))
    assert isinstance(first, socket.socket)
    assert os.path.exists(tmp_path / "lock")
