"""Samples and suspended turns to bytes and back, bit for bit: a JSON header, raw little-endian arrays behind it.

    header length, u32 | header {fields, arrays: [[name, dtype, count], ...]} | array bytes, in that order

Masks and versions of a sample are run-length encoded in the header. Log-probs are stored as float32 where that loses
nothing. A record of turns holds those of one sample in order: requests and completions in the header, every list of
numbers of theirs in one array a name, and the experts of each that has some in one array.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields as fields_of, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import PluginError
from slime_core.protocols import RequestTurn
from slime_core.types import ArrayRef, Completion, GenerateRequest, Sample, SamplingParams

LENGTH = struct.Struct("<I")
FORMAT = 1
FLOATS = ("rollout_log_probs", "teacher_log_probs", "advantages", "returns")
RUNS = ("loss_mask", "weight_versions")
REFS = ("rollout_routed_experts", "rollout_top_p_token_ids")
MEDIA = "multimodal_train_inputs"
ARRAYS = (*REFS, MEDIA)
PLAIN = tuple(item.name for item in fields_of(Sample) if item.name not in ("tokens", *FLOATS, *RUNS))
DEFAULTS = {name: getattr(Sample(), name) for name in PLAIN}  # a field that has its default is not written
TURN_INTS = ("tokens", "versions")  # of a Completion, one entry a new token
TURN_LOGS = ("log_probs",)
TURN_PLAIN = "plain_log_probs"  # empty where the engine has none; NaN in a record
TURN_EXPERTS = "routed_experts"


def encode(sample: Sample, refs: Mapping[str, Any] | None = None) -> list[bytes | memoryview]:
    """The parts of a sample's record; ``refs`` are written in place of fields that hold arrays in memory.

    Raises:
        PluginError: PLG57, a field that a plugin filled with something JSON cannot hold.
    """
    arrays = [("tokens", ints(sample.tokens))]
    arrays += [(name, floats(values)) for name in FLOATS if (values := getattr(sample, name)) is not None]
    values = {name: getattr(sample, name) for name in PLAIN} | dict(refs or {})
    fields = {n: value for n, value in values.items() if (n in ARRAYS and value is not None) or value != DEFAULTS[n]}
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
    text = json.dumps(header, separators=(",", ":"), default=plain).encode("ascii")
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


def array_refs(sample: Sample, fields: Mapping[str, Any] | None = None) -> dict[str, ArrayRef]:
    """The arrays that lie in records of their own, by field or by ``multimodal_train_inputs.KEY``.

    ``fields`` are :func:`stored_arrays` of the sample, in place of its own.
    """
    values = {name: getattr(sample, name) for name in ARRAYS} | dict(fields or {})
    values |= {f"{MEDIA}.{key}": ref for key, ref in (values.pop(MEDIA) or {}).items()}
    return {name: ref for name, ref in values.items() if isinstance(ref, ArrayRef)}


def stored_arrays(sample: Sample, write: Callable[[NDArray[Any]], ArrayRef]) -> dict[str, Any]:
    """The fields that hold arrays in memory, with what ``write`` returns in the arrays' places."""
    fields: dict[str, Any] = {
        name: write(array) for name in REFS if isinstance(array := getattr(sample, name), np.ndarray)
    }
    media = sample.multimodal_train_inputs or {}
    if any(isinstance(array, np.ndarray) for array in media.values()):
        fields[MEDIA] = {key: write(one) if isinstance(one, np.ndarray) else one for key, one in media.items()}
    return fields


def plain(value: Any) -> Any:
    """What JSON has no word for, and we do.

    Raises:
        TypeError: we neither.
    """
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


def encode_turns(turns: Sequence[RequestTurn]) -> list[bytes | memoryview]:
    """The parts of a record."""
    pieces = [piece for turn in turns for piece in turn.pieces]
    arrays = [("prompt", ints([token for turn in turns for token in turn.request.tokens]))]
    arrays += [(name, ints(_joined(pieces, name))) for name in TURN_INTS]
    arrays += [(name, floats(_joined(pieces, name))) for name in TURN_LOGS]
    arrays.append((TURN_PLAIN, floats([value for piece in pieces for value in _plain_log_probs(piece)])))
    if rows := [piece.routed_experts.ravel() for piece in pieces if piece.routed_experts is not None]:
        arrays.append((TURN_EXPERTS, np.concatenate(rows)))
    return pack({"turns": [_header(turn) for turn in turns]}, arrays)


def decode_turns(body: bytes) -> list[RequestTurn]:
    """The turns of a record that :func:`encode_turns` made.

    Raises:
        ValueError: a record of another format.
    """
    fields, arrays = unpack(body)
    experts, experts_at = arrays.pop(TURN_EXPERTS, np.empty(0)), 0
    numbers = {name: array.tolist() for name, array in arrays.items()}
    turns, prompt_at, piece_at = [], 0, 0
    for header in fields["turns"]:
        request, end = dict(header["request"]), prompt_at + header["prompt"]
        params = SamplingParams(**{**request.pop("params"), **_tuples(header["request"]["params"])})
        turn = RequestTurn(
            request=GenerateRequest(tokens=numbers["prompt"][prompt_at:end], params=params, **request),
            finish=header["finish"],
            media=header.get("media"),
        )
        prompt_at = end
        for count, scalars in header["pieces"]:
            part = slice(piece_at, piece_at + count)
            lists = {name: numbers[name][part] for name in (*TURN_INTS, *TURN_LOGS, TURN_PLAIN)}
            lists[TURN_PLAIN] = [] if any(map(math.isnan, lists[TURN_PLAIN])) else lists[TURN_PLAIN]
            if shape := scalars.pop(TURN_EXPERTS, None):
                size = math.prod(shape)
                lists[TURN_EXPERTS] = experts[experts_at : experts_at + size].reshape(shape).copy()
                experts_at += size
            turn.pieces.append(Completion(**scalars, **lists))
            piece_at += count
        turns.append(turn)
    return turns


def cut(turns: Iterable[RequestTurn], before: int) -> list[RequestTurn]:
    """The turns up to the first token that version ``before`` or a later one made.

    A turn that loses tokens continues (``finish`` is empty, the cut piece ends in ``abort`` without its text); one
    that keeps no token is left out, and so is everything behind it.

    Example: one turn of versions [3, 3] and [3, 4], before 4, keeps [3, 3] and [3]
    """
    cut_turns = []
    for turn in turns:
        pieces, whole = _pieces_before(turn.pieces, before)
        if any(piece.tokens for piece in pieces) or (whole and pieces):
            cut_turns.append(replace(turn, pieces=pieces, finish=turn.finish if whole else ""))
        if not whole:
            break
    return cut_turns


def _pieces_before(pieces: Sequence[Completion], before: int) -> tuple[list[Completion], bool]:
    completions: list[Completion] = []
    for piece in pieces:
        end = next((i for i, version in enumerate(piece.versions) if version >= before), None)
        if end is None:
            completions.append(piece)
            continue
        if end:
            lists = {name: getattr(piece, name)[:end] for name in (*TURN_INTS, *TURN_LOGS, TURN_PLAIN)}
            rows = piece.routed_experts
            if rows is not None:
                rows = rows[: len(rows) - len(piece.tokens) + end]
            completions.append(replace(piece, **lists, routed_experts=rows, finish="abort", text=""))
        return completions, False
    return completions, True


def _header(turn: RequestTurn) -> dict[str, Any]:
    media = turn.request.media.digest() if turn.request.media is not None else ""
    request = asdict(replace(turn.request, media=None))
    del request["media"]  # the sample has references to it
    count, pieces = len(request.pop("tokens")), [_scalars(piece) for piece in turn.pieces]
    return {"request": request, "prompt": count, "finish": turn.finish, "media": media, "pieces": pieces}


def _scalars(piece: Completion) -> tuple[int, dict[str, Any]]:
    fields = asdict(replace(piece, routed_experts=None))
    del fields["seconds"], fields[TURN_EXPERTS]
    if piece.routed_experts is not None:
        fields[TURN_EXPERTS] = list(piece.routed_experts.shape)
    for name in (*TURN_INTS, *TURN_LOGS, TURN_PLAIN):
        if len(fields.pop(name)) != len(piece.tokens) and not (name == TURN_PLAIN and not piece.plain_log_probs):
            raise ValueError(f"request {piece.id}: {name} does not have one entry a token")
    return len(piece.tokens), fields


def _plain_log_probs(piece: Completion) -> list[float]:
    return piece.plain_log_probs or [math.nan] * len(piece.tokens)


def _tuples(params: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in params.items() if isinstance(value, list)}


def _joined(pieces: Iterable[Completion], name: str) -> list[Any]:
    return [value for piece in pieces for value in getattr(piece, name)]
