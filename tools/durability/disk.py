"""What a disk may hold after a crash: calls of `durable.disk` recorded, and every prefix of them replayed.

    before, disk = tree_of(root), RecordingDisk(root)
    with recorded(disk) as calls:
        ...the code under test writes into root...
    assert violations(before, calls, tmp_path, check) == []

A crash keeps what was synced. Of the rest, every write may be lost, kept, cut in half, or be zeros of the right
length, and every new name, rename and removal may be lost or kept; each on its own, in any combination. That is less
than any file system promises, so what survives here survives on all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from slime_core import durable
from slime_core.durable import Disk

COMBINATIONS = 256  # states tried of a prefix whose unsynced calls have no more of them; else each call in turn
Tree = dict[str, bytes | None]
"""Files by path relative to the root, with their bytes; None is a folder."""


@dataclass(slots=True, frozen=True)
class Call:
    """One call; ``path`` and ``other`` are relative to the root."""

    kind: str
    path: str
    other: str = ""
    data: bytes = b""
    offset: int = 0


class RecordingDisk(Disk):
    """Does what `Disk` does, and remembers it. Subclasses leave calls out or reorder them: mutants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Call] = []
        self._names: dict[int, str] = {}  # of open descriptors: the name that the file was made with

    def _told(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def create(self, path: Path) -> int:
        """See `Disk`."""
        fd = super().create(path)
        self._names[fd] = f"{len(self.calls)}:{self._told(path)}"
        self.calls.append(Call("create", self._told(path), other=self._names[fd]))
        return fd

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """See `Disk`."""
        super().write(fd, data, offset)
        if fd in self._names:
            self.calls.append(Call("write", self._names[fd], data=bytes(data), offset=offset))

    def sync(self, fd: int) -> None:
        """See `Disk`."""
        super().sync(fd)
        if fd in self._names:
            self.calls.append(Call("sync", self._names[fd]))

    def close(self, fd: int) -> None:
        """See `Disk`."""
        super().close(fd)
        self._names.pop(fd, None)

    def sync_folder(self, folder: Path) -> None:
        """See `Disk`."""
        super().sync_folder(folder)
        self.calls.append(Call("sync_folder", self._told(folder)))

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        super().rename(old, new)
        self.calls.append(Call("rename", self._told(old), other=self._told(new)))

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        super().make_folder(path)
        self.calls.append(Call("make_folder", self._told(path)))

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        super().remove(path)
        self.calls.append(Call("remove", self._told(path)))

    def remove_tree(self, path: Path) -> None:
        """See `Disk`."""
        super().remove_tree(path)
        self.calls.append(Call("remove_tree", self._told(path)))


@contextmanager
def recorded(disk: RecordingDisk) -> Iterator[list[Call]]:
    """`durable.disk` is this one inside the block."""
    before, durable.disk = durable.disk, disk
    try:
        yield disk.calls
    finally:
        durable.disk = before


def tree_of(root: Path) -> Tree:
    """Everything below ``root``."""
    paths = sorted(root.rglob("*"))
    return {p.relative_to(root).as_posix(): None if p.is_dir() else p.read_bytes() for p in paths}


def write_tree(tree: Mapping[str, bytes | None], root: Path) -> None:
    """Make ``root`` hold a tree."""
    root.mkdir(parents=True)
    for name, data in sorted(tree.items()):
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


@dataclass(slots=True, eq=False)
class _File:
    data: bytes = b""
    pending: list[Call] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    live: dict[str, _File | _Folder] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Name:
    """A change of a folder's names that is not durable: ``new`` is given to ``node``, ``old`` taken from it."""

    folder: _Folder
    node: _File | _Folder
    old: str = ""
    new: str = ""

    def apply(self, names: dict[str, _File | _Folder]) -> None:
        if self.old and names.get(self.old) is self.node:
            del names[self.old]
        if self.new:
            names[self.new] = self.node


class _Machine:
    """The disk as it is while calls are replayed."""

    def __init__(self, before: Tree) -> None:
        self.root = _Folder()
        self.files: dict[str, _File] = {}  # by the name that a descriptor remembers
        self.names: list[_Name] = []
        for path, data in sorted(before.items()):
            folder, name = self._at(path)
            folder.durable[name] = folder.live[name] = _Folder() if data is None else _File(data)

    def _at(self, path: str) -> tuple[_Folder, str]:
        *parents, name = PurePosixPath(path).parts
        folder = self.root
        for part in parents:
            inner = folder.live[part]
            assert isinstance(inner, _Folder)
            folder = inner
        return folder, name

    def _folder(self, path: str) -> _Folder:
        if path == ".":
            return self.root
        folder, name = self._at(path)
        found = folder.live[name]
        assert isinstance(found, _Folder)
        return found

    def _change(self, change: _Name) -> None:
        change.apply(change.folder.live)
        self.names.append(change)

    def do(self, call: Call) -> None:
        """Replay one call."""
        match call.kind:
            case "create":
                folder, name = self._at(call.path)
                self.files[call.other] = _File()
                self._change(_Name(folder, self.files[call.other], new=name))
            case "write":
                self.files[call.path].pending.append(call)
            case "sync":
                file = self.files[call.path]
                file.data, file.pending = _written(file, ["kept"] * len(file.pending)), []
            case "make_folder":
                folder, name = self._at(call.path)
                self._change(_Name(folder, _Folder(), new=name))
            case "sync_folder":
                folder = self._folder(call.path)
                for change in [one for one in self.names if one.folder is folder]:
                    change.apply(folder.durable)
                    self.names.remove(change)
            case "rename":
                folder, old = self._at(call.path)
                other, new = self._at(call.other)
                assert folder is other, "renames between folders are not modelled"
                self._change(_Name(folder, folder.live[old], old=old, new=new))
            case "remove" | "remove_tree":
                self._remove(*self._at(call.path))
            case _:
                raise ValueError(call.kind)

    def _remove(self, folder: _Folder, name: str) -> None:
        node = folder.live[name]
        if isinstance(node, _Folder):
            for inner in list(node.live):
                self._remove(node, inner)
        self._change(_Name(folder, node, old=name))

    def states(self) -> Iterator[Tree]:
        """Every state that a crash now may leave."""
        dirty = [file for file in self._files() if file.pending]
        writes = [(file, i) for file in dirty for i in range(len(file.pending))]
        fates: list[tuple[str, ...]] = [("kept", "lost", "half", "zeros")] * len(writes)
        fates += [("kept", "lost")] * len(self.names)
        for chosen in _choices(fates):
            of_file: dict[int, list[str]] = {}
            for (file, _), fate in zip(writes, chosen):
                of_file.setdefault(id(file), []).append(fate)
            kept = [n for n, fate in zip(self.names, chosen[len(writes) :], strict=True) if fate == "kept"]
            yield self._tree(of_file, kept)

    def _files(self) -> Iterator[_File]:
        """Those that were there before the recording have no pending writes."""
        yield from self.files.values()

    def _tree(self, fates: Mapping[int, list[str]], kept: list[_Name]) -> Tree:
        names: dict[int, dict[str, _File | _Folder]] = {}

        def of(folder: _Folder) -> dict[str, _File | _Folder]:
            return names.setdefault(id(folder), dict(folder.durable))

        for change in kept:
            change.apply(of(change.folder))
        tree: Tree = {}

        def walk(folder: _Folder, path: str) -> None:
            for name, node in sorted(of(folder).items()):
                if isinstance(node, _Folder):
                    tree[path + name] = None
                    walk(node, f"{path}{name}/")
                else:
                    tree[path + name] = _written(node, fates.get(id(node), []))

        walk(self.root, "")
        return tree


def _written(file: _File, fates: list[str]) -> bytes:
    data = bytearray(file.data)
    for call, fate in zip(file.pending, fates, strict=True):
        if fate == "lost":
            continue
        part = {"kept": call.data, "half": call.data[: len(call.data) // 2], "zeros": bytes(len(call.data))}[fate]
        if len(data) < call.offset:
            data += bytes(call.offset - len(data))
        data[call.offset : call.offset + len(part)] = part
    return bytes(data)


def _choices(fates: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """All combinations where they are few; else all kept, all of one other fate, and each call in turn."""
    count = 1
    for options in fates:
        count *= len(options)
    if count <= COMBINATIONS:
        yield from itertools.product(*fates)
        return
    kept = ["kept"] * len(fates)
    yield tuple(kept)
    for fate in ("lost", "half", "zeros"):
        yield tuple(fate if fate in options else "lost" for options in fates)
    for i, options in enumerate(fates):
        for fate in options[1:]:
            yield (*kept[:i], fate, *kept[i + 1 :])
        yield (*["lost"] * i, "kept", *["lost"] * (len(fates) - i - 1))


def crashes(before: Tree, calls: list[Call]) -> Iterator[tuple[int, Tree]]:
    """Every state that a crash after some of the calls may leave, with their number; each state once a number."""
    machine = _Machine(before)
    for done in range(len(calls) + 1):
        seen = set()
        for tree in machine.states():
            key = tuple(sorted(tree.items()))
            if key not in seen:
                seen.add(key)
                yield done, tree
        if done < len(calls):
            machine.do(calls[done])


def violations(
    before: Tree, calls: list[Call], root: Path, check: Callable[[Path, bool], None], *, most: int = 1
) -> list[str]:
    """What ``check(folder, whether all calls were made)`` finds wrong in states after crashes, at most ``most``.

    The check raises AssertionError, or whatever the loader raises; each different state is checked once.
    """
    found: list[str] = []
    seen: set[tuple[bool, tuple[tuple[str, bytes | None], ...]]] = set()
    for number, (done, tree) in enumerate(crashes(before, calls)):
        key = (done == len(calls), tuple(sorted(tree.items())))
        if key in seen:
            continue
        seen.add(key)
        folder = root / str(number)
        write_tree(tree, folder)
        try:
            check(folder, done == len(calls))
        except Exception as error:
            last = calls[done - 1] if done else None
            found.append(f"after {done} calls (the last: {last and (last.kind, last.path)}): {error!r}")
            if len(found) == most:
                break
    return found
