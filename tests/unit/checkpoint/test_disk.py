"""The simulator leaves what a crash may leave: no more than was asked of the disk, and no less than was promised."""

import pytest

from durability.disk import RecordingDisk, crashes, recorded, tree_of
from slime_core import durable

pytestmark = pytest.mark.unit


@pytest.fixture
def after(tmp_path):
    """``after(act, before={})``: the states after all of ``act(root)``'s calls, and those of any number of them."""

    def states(act, before=()):
        root = tmp_path / "root"
        root.mkdir()
        for name, data in dict(before).items():
            (root / name).write_bytes(data)
        tree, disk = tree_of(root), RecordingDisk(root)
        with recorded(disk) as calls:
            act(root)
        found = [(done, state) for done, state in crashes(tree, calls)]
        assert [state for _, state in found if state == tree_of(root)], "what is there now is one of them"
        return [state for done, state in found if done == len(calls)], [state for _, state in found]

    return states


def test_an_unsynced_file_may_be_gone_empty_torn_or_whole(after):
    def act(root):
        fd = durable.disk.create(root / "a")
        durable.disk.write(fd, b"abcd", 0)
        durable.disk.close(fd)

    last, _ = after(act)
    assert sorted(map(str, last)) == sorted(map(str, [{}, *({"a": d} for d in (b"", b"ab", b"abcd", bytes(4)))]))


def test_of_two_unsynced_writes_the_second_may_be_there_alone(after):
    def act(root):
        fd = durable.disk.create(root / "a")
        durable.disk.write(fd, b"ab", 0)
        durable.disk.write(fd, b"cd", 2)
        durable.disk.close(fd)

    last, _ = after(act)
    assert {"a": b"\0\0cd"} in last
    assert {"a": b"ab"} in last


def test_what_is_synced_under_a_synced_name_stays(after):
    def act(root):
        durable.write_file(root / "a", [b"ab", b"cd"])
        durable.disk.sync_folder(root)

    last, _ = after(act)
    assert last == [{"a": b"abcd"}]


def test_a_synced_file_without_a_synced_name_may_be_gone_and_is_never_torn(after):
    last, _ = after(lambda root: durable.write_file(root / "a", [b"ab", b"cd"]))
    assert sorted(map(str, last)) == sorted(map(str, [{}, {"a": b"abcd"}]))


def test_a_rename_is_whole_or_has_not_been(after):
    last, every = after(lambda root: durable.disk.rename(root / "old", root / "new"), {"old": b"1", "new": b"2"})
    assert len(last) == 2
    assert {"new": b"1"} in last
    assert {"old": b"1", "new": b"2"} in last
    assert {"old": b"1"} not in every


def test_a_removed_folder_may_be_there_in_any_part(after):
    def act(root):
        durable.disk.make_folder(root / "f")
        for name in "ab":
            durable.write_file(root / "f" / name, [name.encode()])
        durable.disk.sync_folder(root / "f")
        durable.disk.sync_folder(root)
        durable.disk.remove_tree(root / "f")

    last, _ = after(act)
    assert [{"f": None, **rest} in last for rest in ({}, {"f/a": b"a"}, {"f/b": b"b"})] == [True] * 3
    assert {} in last
