"""A database never lies on a network file system, and says where it may lie instead."""

import pytest

from slime_core.errors import StorageError
from slime_core.ledger import schema as module
from slime_core.ledger.ledger import SqliteLedger
from slime_core.ledger.schema import NETWORK, database_path, network_type, own_folder
from slime_core.testing.contracts import sample_group

pytestmark = pytest.mark.unit


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Pretend that (folder, type) pairs are mounted, over an ext4 root."""

    def pretend(*pairs):
        lines = [("/", "ext4"), *pairs]
        text = "".join(
            f"{i} 1 0:{i} / {where} rw shared:1 - {kind} source rw\n" for i, (where, kind) in enumerate(lines)
        )
        path = tmp_path / "mountinfo"
        path.write_text(text)
        monkeypatch.setattr(module, "MOUNTS", path)

    return pretend


@pytest.mark.parametrize("kind", [*sorted(NETWORK), "fuse.sshfs", "fuse.s3fs", "fuse"])
def test_network_file_systems_are_known(mounts, tmp_path, kind):
    mounts((tmp_path, kind))
    assert network_type(tmp_path / "runs" / "r-0") == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", "fuse.fuse-overlayfs"])
def test_local_file_systems_are_local(mounts, tmp_path, kind):
    mounts((tmp_path, kind))
    assert network_type(tmp_path) == ""


def test_the_innermost_and_latest_mount_counts(mounts, tmp_path):
    local = tmp_path / "local"
    mounts((tmp_path, "nfs4"), (local, "ext4"), (tmp_path / "loc", "nfs"))
    assert network_type(local / "run") == ""
    assert network_type(tmp_path / "other") == "nfs4"
    mounts((tmp_path, "nfs4"), (tmp_path, "ext4"))
    assert network_type(tmp_path) == ""


def test_a_mount_with_a_blank_in_its_name_is_found(mounts, tmp_path):
    mounts((f"{tmp_path}/a\\040b", "nfs"))
    assert network_type(tmp_path / "a b" / "run") == "nfs"


def test_the_way_through_a_symbolic_link_is_followed(mounts, tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "remote")
    mounts((tmp_path / "remote", "lustre"))
    assert network_type(tmp_path / "link" / "run") == "lustre"


def test_a_run_directory_on_a_network_is_refused_before_anything_is_made(mounts, tmp_path):
    run = tmp_path / "share" / "run"
    mounts((tmp_path / "share", "nfs4"))
    with pytest.raises(StorageError) as caught:
        SqliteLedger(run)
    assert caught.value.code == "STO118"
    assert "nfs4" in caught.value.what
    assert "--ledger-dir" in caught.value.fix
    assert not run.exists()


def test_a_ledger_dir_on_a_network_is_refused_too(mounts, tmp_path):
    mounts((tmp_path / "share", "cifs"))
    with pytest.raises(StorageError) as caught:
        database_path(tmp_path / "share" / "run", tmp_path / "share" / "ledgers")
    assert caught.value.code == "STO118"
    assert "report.ledger_dir" in caught.value.what


def test_with_a_local_folder_the_database_lies_there_and_segments_stay(mounts, tmp_path, with_ledger):
    share, local = tmp_path / "share", tmp_path / "local"
    mounts((share, "nfs4"))

    async def write(ledger):
        await ledger.finish(sample_group(0))
        assert ledger.path.parent == own_folder(share / "run", local)

    async def read(ledger):
        return [sample.id for sample in await ledger.samples(["main/0-0"])]

    with_ledger(write, folder=share / "run", ledger_dir=local)
    assert with_ledger(read, folder=share / "run", ledger_dir=str(local)) == ["main/0-0"]
    assert {path.name for path in (share / "run").iterdir()} == {"segments"}
    assert own_folder(share / "run-2", local) != own_folder(share / "run", local)


def test_without_proc_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MOUNTS", tmp_path / "nothing")
    assert network_type(tmp_path) == ""
