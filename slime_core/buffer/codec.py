"""A Sample to bytes and back, bit for bit: a JSON header for scalars and text, raw little-endian arrays behind it.

    header length, u32 | header {fields, arrays: [[name, dtype, count], ...]} | array bytes, in that order

Masks and versions are run-length encoded in the header. Log-probs are stored as float32 where that loses nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields as fields_of
from itertools import groupby
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
    arrays = [("tokens", _ints(sample.tokens))]
    arrays += [(name, _floats(values)) for name in FLOATS if (values := getattr(sample, name)) is not None]
    fields = {name: getattr(sample, name) for name in PLAIN if getattr(sample, name) != DEFAULTS[name]}
    fields |= {name: _runs(values) for name in RUNS if (values := getattr(sample, name)) is not None}
    header = {"format": FORMAT, "fields": fields, "arrays": [[name, a.dtype.str, a.size] for name, a in arrays]}
    try:
        text = json.dumps(header, separators=(",", ":"), default=_plain).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise PluginError(
            f"sample {sample.id} cannot be stored: {error}",
            code="PLG57",
            where=f"sample {sample.id}",
            why="metadata, train_metadata, label and reward are kept as JSON",
            fix="keep numbers, strings, lists and dicts there; arrays go in an ArrayRef",
        ) from error
    return [LENGTH.pack(len(text)), text, *(a.view(np.uint8).data for _, a in arrays if a.size)]


def decode(body: bytes) -> Sample:
    """The sample of a record that :func:`encode` made.

    Raises:
        ValueError: a record of another format.
    """
    (length,) = LENGTH.unpack_from(body)
    place = LENGTH.size + length
    header = json.loads(body[LENGTH.size : place])
    if header["format"] != FORMAT:
        raise ValueError(f"record format {header['format']}, this version reads {FORMAT}")
    fields: dict[str, Any] = header["fields"]
    for name, dtype, count in header["arrays"]:
        array = np.frombuffer(body, dtype=dtype, count=count, offset=place)
        fields[name] = array.tolist()
        place += array.nbytes
    for name in RUNS:
        if name in fields:
            fields[name] = [value for value, count in fields[name] for _ in range(count)]
    return Sample.from_dict(fields)


def _plain(value: Any) -> Any:
    """What JSON has no word for, and we do."""
    if isinstance(value, ArrayRef):
        return asdict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _ints(values: Sequence[int]) -> NDArray[Any]:
    array = np.asarray(values, dtype=np.int64)
    narrow = array.astype("<i4")
    return narrow if np.array_equal(narrow, array) else array.astype("<i8")


def _floats(values: Sequence[float]) -> NDArray[Any]:
    array = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore"):
        narrow = array.astype("<f4")
    return narrow if np.array_equal(narrow.astype("<f8"), array, equal_nan=True) else array


def _runs(values: Sequence[int]) -> list[list[int]]:
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]


def plain_reward(sample: Sample) -> float | None:
    """The reward as one number for the ledger's own column, or None where it is none."""
    reward = sample.reward
    if isinstance(reward, dict) or reward is None:
        return None
    value = float(reward)
    return value if math.isfinite(value) else None
