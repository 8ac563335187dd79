"""A Sample to bytes and back, bit for bit: a JSON header for scalars and text, raw little-endian arrays behind it.

    header length, u32 | header {fields, arrays: [[name, dtype, count], ...]} | array bytes, in that order

Masks and versions are run-length encoded in the header. Log-probs are stored as float32 where that loses nothing.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields as fields_of
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import PluginError
from slime_core.types import ArrayRef, Sample

LENGTH = struct.Struct("<I")
FORMAT = 1
FLOATS = ("rollout_log_probs", "teacher_log_probs", "advantages", "returns")
RUNS = ("loss_mask", "weight_versions")
PLAIN = tuple(item.name for item in fields_of(Sample) if item.name not in ("tokens", *FLOATS, *RUNS))
DEFAULTS = {name: getattr(Sample(), name) for name in PLAIN}  # a field that has its default is not written


def encode(sample: Sample) -> list[bytes | memoryview]:
    """The parts of a sample's record.

    Raises:
        PluginError: PLG57, a field that a plugin filled with something JSON cannot hold.
    """
    arrays = [("tokens", ints(sample.tokens))]
    arrays += [(name, floats(values)) for name in FLOATS if (values := getattr(sample, name)) is not None]
    fields = {name: getattr(sample, name) for name in PLAIN if getattr(sample, name) != DEFAULTS[name]}
    fields |= {name: _runs(values) for name in RUNS if (values := getattr(sample, name)) is not None}
    try:
        return pack(fields, arrays)
    except (TypeError, ValueError, RecursionError) as error:
        raise PluginError(
            f"sample {sample.id} cannot be stored: {error}",
            code="PLG57",
            where=f"sample {sample.id}",
            why="metadata, train_metadata, label and reward are kept as JSON",
            fix="keep numbers, strings, lists and dicts there; arrays go in an ArrayRef",
        ) from error


def decode(body: bytes) -> Sample:
    """The sample of a record that :func:`encode` made.

    Raises:
        ValueError: a record of another format.
    """
    fields, arrays = unpack(body)
    fields |= {name: values.tolist() for name, values in arrays.items()}
    for name in RUNS:
        if name in fields:
            fields[name] = [value for value, count in fields[name] for _ in range(count)]
    return Sample.from_dict(fields)


def pack(fields: dict[str, Any], arrays: Sequence[tuple[str, NDArray[Any]]]) -> list[bytes | memoryview]:
    """The parts of a record: a JSON header and the arrays' bytes.

    Raises:
        TypeError, ValueError: fields that JSON cannot hold.
    """
    header = {"format": FORMAT, "fields": fields, "arrays": [[name, a.dtype.str, a.size] for name, a in arrays]}
    text = json.dumps(header, separators=(",", ":"), default=_plain).encode("ascii")
    return [LENGTH.pack(len(text)), text, *(a.view(np.uint8).data for _, a in arrays if a.size)]


def unpack(body: bytes | memoryview) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Fields and arrays of a record that :func:`pack` made; the arrays are views of ``body``.

    Raises:
        ValueError: a record of another format.
    """
    (length,) = LENGTH.unpack_from(body)
    place = LENGTH.size + length
    header = json.loads(bytes(body[LENGTH.size : place]))
    if header["format"] != FORMAT:
        raise ValueError(f"record format {header['format']}, this version reads {FORMAT}")
    arrays = {}
    for name, dtype, count in header["arrays"]:
        arrays[name] = np.frombuffer(body, dtype=dtype, count=count, offset=place)
        place += arrays[name].nbytes
    return header["fields"], arrays


def _plain(value: Any) -> Any:
    """What JSON has no word for, and we do."""
    if isinstance(value, ArrayRef):
        return asdict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def ints(values: Sequence[int]) -> NDArray[Any]:
    """Little-endian, 4 bytes each where that holds them, else 8."""
    try:
        narrow = array("i", values)  # several times as fast as numpy on a list
    except OverflowError:
        return np.asarray(values, dtype="<i8")
    return np.frombuffer(narrow, dtype=np.int32).astype("<i4", copy=False)


def floats(values: Sequence[float]) -> NDArray[Any]:
    """Little-endian float32 where that keeps every bit, else float64."""
    wide = np.frombuffer(array("d", values), dtype=np.float64).astype("<f8", copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
    same = np.array_equal(narrow.astype("<f8").view("<i8"), wide.view("<i8"))
    return narrow if same else wide


def _runs(values: Sequence[int]) -> list[list[int]]:
    """[value, how often] of each run of equal values."""
    if not values or values.count(values[0]) == len(values):
        return [[values[0], len(values)]] if values else []
    flat = np.frombuffer(array("q", values), dtype=np.int64)
    starts = [0, *(np.flatnonzero(flat[1:] != flat[:-1]) + 1).tolist(), len(values)]
    return [[values[start], end - start] for start, end in pairwise(starts)]


def plain_reward(sample: Sample) -> float | None:
    """The reward as one number for the ledger's own column, or None where it is none."""
    reward = sample.reward
    if isinstance(reward, dict) or reward is None:
        return None
    value = float(reward)
    return value if math.isfinite(value) else None
