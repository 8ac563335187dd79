"""A step's groups as one file, written while a run trains and read by another run, by tools and by people.

    file     "slimeRD1" | header length, u32 | crc32 of the header, u32 | header | bodies, in the header's order
    header   JSON: version stage run groups; a group has prompt, rollouts (id -> sample indices) and samples; a sample
             has size and crc32 of its body, and the same of each array that it refers to, or whose it is
    body     a sample as the ledger keeps it (`ledger.codec`), or an array's bytes; all numbers little endian

``step-000001.rollout`` holds what the step that made version 1 trained on, ``eval-NAME-000001.rollout`` an evaluation.
No pickle. A file is whole or not there: it gets its name when it is durable. `DumpedGroups` stands in the place of a
collector: nothing is generated, ledger and loop see a step like any other.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.durable import replace_file, storage_error
from slime_core.errors import ConfigError, DataError, PluginError, StorageError
from slime_core.ledger import segments
from slime_core.ledger.codec import array_refs, decode, encode, plain
from slime_core.rollout.groups import Counts, GroupSource
from slime_core.types import ArrayRef, Drop, Group, Prompt, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Ledger

MAGIC = b"slimeRD1"
FRAME = struct.Struct("<II")
SUFFIX = ".rollout"
STEP = re.compile(r"step-(\d{6,})\.rollout")
EVALUATION = re.compile(r"eval-([A-Za-z0-9._-]{1,64})-(\d{6,})\.rollout")
ROLLED_OUT = "debug_rollout_only"  # why samples of a run that only rolls out are dropped


@dataclass(slots=True, frozen=True, kw_only=True)
class DumpHeader:
    """The header of a dump file."""

    version: int  # that the step made; of the weights, for an evaluation
    stage: str = "main"
    set: str = ""  # the evaluation set; empty for a step
    run: str = ""  # the run directory that wrote it


def step_path(folder: Path, version: int) -> Path:
    """The file of the step that made ``version``."""
    return folder / f"step-{version:06d}{SUFFIX}"


def evaluation_path(folder: Path, name: str, version: int) -> Path:
    """The file of an evaluation set at ``version``."""
    return folder / f"eval-{name}-{version:06d}{SUFFIX}"


def write_dump(path: Path, groups: Sequence[Group], header: DumpHeader, *, arrays: Path | None = None) -> None:
    """Write one file, whole and durable. ``arrays`` is the run's ``segments/`` folder, whose arrays are copied.

    Raises:
        PluginError: PLG57, a field that JSON cannot hold.
        StorageError: STO109 disk full, STO110 not writable, STO111 or STO112 an array that cannot be read.
    """
    bodies: list[bytes] = []
    rows = [_group_row(group, bodies, arrays, {}) for group in groups]
    try:
        text = json.dumps({**asdict(header), "groups": rows}, separators=(",", ":"), default=plain).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise PluginError(
            f"the prompts of {path.name} cannot be stored: {error}",
            code="PLG57",
            why="metadata and label are kept as JSON",
            fix="keep numbers, strings, lists and dicts there",
        ) from error
    data = b"".join([MAGIC, FRAME.pack(len(text), zlib.crc32(text)), text, *bodies])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise storage_error(error, path, "a dump of rollouts cannot be written") from error


def read_dump(path: Path, *, arrays: segments.Segments | None = None) -> list[Group]:
    """The groups of a file, every field as it was.

    With ``arrays`` the file's arrays are written there and the samples refer to them; without, they refer to the run
    that made them.

    Raises:
        StorageError: STO111 there is no such file, STO112 it is cut short or changed, STO113 it is something else.
    """
    return read_dump_with_header(path, arrays=arrays)[0]


def read_dump_with_header(path: Path, *, arrays: segments.Segments | None = None) -> tuple[list[Group], DumpHeader]:
    """:func:`read_dump`, and the file's header."""
    file = _open(path)
    header, rows = _header(file, path)
    groups = []
    for row in rows:
        shared: dict[str, ArrayRef] = {}
        samples = [_sample(item, file, path, arrays, shared) for item in row["samples"]]
        rollouts = {int(name): list(members) for name, members in row["rollouts"].items()}
        groups.append(Group(prompt=Prompt(**row["prompt"]), samples=samples, rollouts=rollouts))
    if arrays is not None:
        arrays.sync()
    return groups, header


class Dump:
    """Writes what a run rolls out into the folder `save_debug_rollout_data`; without one it does nothing.

    Example: Dump(config, run_dir).write(version + 1, "grpo", groups)
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        folder = config.rollout.save_debug_rollout_data
        self._run_dir, self._folder = run_dir, Path(folder) if folder else None
        self.saves = self._folder is not None  # whether steps are written
        if self._folder is not None:
            _check_own(self._folder, run_dir)

    def write(self, version: int, stage: str, groups: Sequence[Group], name: str = "") -> None:
        """Keep what the step that makes ``version`` trains on, or what an evaluation of the set ``name`` at it made.

        Raises:
            PluginError, StorageError: as :func:`write_dump`.
        """
        if self._folder is not None:
            path = evaluation_path(self._folder, name, version) if name else step_path(self._folder, version)
            header = DumpHeader(version=version, stage=stage, set=name, run=str(self._run_dir))
            write_dump(path, groups, header, arrays=self._run_dir / "segments")


async def drop_groups(ledger: Ledger, groups: Sequence[Group]) -> None:
    """End a step of a run that only rolls out: its samples become dropped(debug_rollout_only).

    Their payloads stay, so a run that goes on from a checkpoint before it takes the same groups again.
    """
    await ledger.drop([([sample for group in groups for sample in group.samples], Drop(reason=ROLLED_OUT))])


class DumpedGroups(GroupSource):
    """Hands over the groups of the dump `load_debug_rollout_data`, a step a call, in the place of a `Collector`.

    Example:
        async with DumpedGroups(ledger, plugins, ctx, run_dir, print) as collector:
            groups = await collector.take(32)
    """

    def __init__(
        self, ledger: Ledger, plugins: Plugins, ctx: Context, run_dir: Path, note: Callable[[str], None]
    ) -> None:
        self._ledger, self._plugins, self._note, self._config = ledger, plugins, note, ctx.config
        self._folder, self._segments = Path(ctx.config.rollout.load_debug_rollout_data), run_dir / "segments"
        self._arrays: segments.Segments | None = None
        self._stage, self._version = ctx.stage, ctx.version
        self._counts = Counts()

    async def __aexit__(self, *error: object) -> None:
        if self._arrays is not None:
            self._arrays.close()

    async def take(self, count: int, recorded: Sequence[int] = ()) -> list[Group]:
        """The groups of the next step, as many as the dump has; ``recorded``, of a journal, names the same ones.

        A dump of another stage is used, and a note says so.

        Raises:
            DataError: DAT28, the dump has no such step.
            StorageError: STO112 a damaged file, STO113 another format; the ledger has the samples in another state.
        """
        groups = await asyncio.to_thread(self._read, self._version + 1)
        if len(groups) != count:
            self._note(f"step {self._version + 1}: the dump has {len(groups)} groups, rollout_batch_size is {count}")
        for group in groups:
            self._plugins.note_group(group, self._config)
        await self._ledger.issue(groups)
        await asyncio.gather(*(self._ledger.finish(group) for group in groups))
        self._counts.issued += len(groups)
        self._counts.tokens += sum(sample.response_length for group in groups for sample in group.samples)
        return groups

    def _read(self, version: int) -> list[Group]:
        path = step_path(self._folder, version)
        if not path.exists():
            steps = sorted(int(match[1]) for p in self._folder.glob(f"*{SUFFIX}") if (match := STEP.fullmatch(p.name)))
            raise DataError(
                f"the dump has no step {version}",
                code="DAT28",
                where=str(path),
                why=f"it holds steps {steps[0]} to {steps[-1]}" if steps else "it holds no step",
                fix=f"--num-rollout {len(steps)} or fewer (it counts in the last stage), or another folder: "
                "--load-debug-rollout-data DIR",
            )
        self._arrays = self._arrays or segments.Segments(self._segments)
        groups, header = read_dump_with_header(path, arrays=self._arrays)
        if header.version != version:
            message = f"{path.name} holds step {header.version}"
            raise DataError(message, code="DAT29", where=str(path), fix="do not rename dump files")
        if header.stage != self._stage:
            self._note(f"step {version}: stage {self._stage} trains on groups of stage {header.stage} ({path.name})")
        return groups

    async def drain(self) -> None:
        """Nothing is ever in flight."""

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained."""
        self._version = version

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def progress(self) -> str:
        """Nothing: reading takes no time."""
        return ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing, the version says which file comes next."""
        return {}


def _check_own(folder: Path, run_dir: Path) -> None:
    """Refuse a folder in which another run's dump lies: two runs' steps would mix."""
    for path in sorted(folder.glob(f"*{SUFFIX}"))[:1]:
        run = _header(_open(path), path)[0].run
        if run != str(run_dir):
            raise ConfigError(
                "the dump folder holds another run's rollouts",
                code="CFG12",
                where=str(folder),
                why=f"{path.name} is of the run {run}",
                fix="name another folder: --save-debug-rollout-data DIR",
            )


def _group_row(group: Group, bodies: list[bytes], arrays: Path | None, owners: dict[ArrayRef, str]) -> dict[str, Any]:
    """A group's entry. ``owners`` is filled: the arrays that are written, and the sample and name that each is of."""
    rows = []
    for sample in group.samples:
        row = _add(b"".join(encode(sample)), bodies)
        if arrays is not None and (refs := array_refs(sample)):
            row["arrays"] = {}
            for name, ref in refs.items():
                shared = owners.setdefault(ref, f"{sample.id} {name}")
                is_first = shared == f"{sample.id} {name}"
                row["arrays"][name] = (
                    _add(segments.read_bytes(arrays, ref), bodies) if is_first else {"shared": shared}
                )
        rows.append(row)
    return {"prompt": asdict(group.prompt), "rollouts": group.rollouts, "samples": rows}


def _add(body: bytes, bodies: list[bytes]) -> dict[str, Any]:
    bodies.append(body)
    return {"size": len(body), "crc32": zlib.crc32(body)}


def _sample(
    row: Mapping[str, Any],
    file: io.BytesIO,
    path: Path,
    arrays: segments.Segments | None,
    shared: dict[str, ArrayRef],
) -> Sample:
    """A sample; ``shared`` are the arrays of its group's samples before it, which it may have too."""
    sample = decode(_body(row, file, path))
    refs = array_refs(sample)
    for name, item in row.get("arrays", {}).items():
        source = item.get("shared", f"{sample.id} {name}")
        body = b"" if "shared" in item else _body(item, file, path)
        if arrays is not None:
            if body or source not in shared:
                shared[source] = arrays.write_array(segments.as_array(body, refs[name]))
            _refer(sample, name, shared[source])
    return sample


def _body(row: Mapping[str, Any], file: io.BytesIO, path: Path) -> bytes:
    body = file.read(row["size"])
    if len(body) != row["size"] or zlib.crc32(body) != row["crc32"]:
        raise _damaged(path)
    return body


def _refer(sample: Sample, name: str, ref: ArrayRef) -> None:
    field, _, key = name.partition(".")
    if key:
        sample.multimodal_train_inputs = {**(sample.multimodal_train_inputs or {}), key: ref}
    else:
        setattr(sample, field, ref)


def _open(path: Path) -> io.BytesIO:
    try:
        return io.BytesIO(path.read_bytes())
    except OSError as error:
        raise storage_error(error, path, "a dump of rollouts cannot be read") from error


def _header(file: io.BytesIO, path: Path) -> tuple[DumpHeader, list[dict[str, Any]]]:
    """The header of a file and its groups' rows; the bodies come next."""
    magic, frame = file.read(len(MAGIC)), file.read(FRAME.size)
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            raise _damaged(path)
        raise StorageError(
            f"{path.name} is not a dump of rollouts of this version",
            code="STO113",
            where=str(path),
            why=f"it does not begin with {MAGIC.decode()}",
        )
    if len(frame) < FRAME.size:
        raise _damaged(path)
    length, crc = FRAME.unpack(frame)
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != crc:
        raise _damaged(path)
    header: dict[str, Any] = json.loads(text)
    rows = header.pop("groups")
    return DumpHeader(**header), rows


def _damaged(path: Path) -> StorageError:
    return StorageError(
        f"{path.name} holds other bytes than were written",
        code="STO112",
        where=str(path),
        why="a checksum differs: the file was cut short or changed",
        fix="restore the file, or write the dump again: --save-debug-rollout-data DIR",
    )
