"""Tensors of safetensors files by name: headers are validated before a byte of any tensor is read.

    8 bytes n, little endian | n bytes JSON {name: {dtype, shape, data_offsets: [begin, end]}} | tensor bytes, no gaps

Tensors are read with plain reads, never mapped, so that a file cut short later is an error and not a crash. Quantised
weights (`fp8.BlockFormat`, `int4.PackedFormat`, `nf4.Nf4Format`) are read as floats; their scales are not tensors of
their own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import DataError
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.int4 import PACKED, PackedFormat
from slime_core.weights.nf4 import DTYPES, PARTS, STATE, Nf4Weight
from slime_core.weights.stored_forms import storage_form
from slime_core.weights.tensor_info import Read, TensorInfo

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"

FP8 = "F8_E4M3"  # with scales beside it
WIDE = {"F64": 8, "F32": 4, "I64": 8, "I32": 4}
SIZES = WIDE | {"F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, FP8: 1}
"""Bytes an element of every dtype that loads here."""

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    FP8: "float8_e4m3fn",
}


@dataclass(slots=True, frozen=True)
class StoredWeight:
    """What a quantised weight is computed from."""

    form: BlockFormat | PackedFormat
    numbers: TensorInfo
    scales: TensorInfo

    def rows(self, first: int, count: int) -> StoredWeight:
        """As `TensorInfo.rows`."""
        height = self.form.height
        scales = self.scales.rows(first // height, -(-count // height))
        return replace(self, numbers=self.numbers.rows(first, count), scales=scales)

    def values(self, read: Read) -> torch.Tensor:
        """The floats, in bfloat16."""
        import torch

        return self.form.dequantise(read(self.numbers), read(self.scales), torch.bfloat16)

    def parts(self, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales."""
        return read(self.numbers), read(self.scales)


class Shards(Mapping[str, "torch.Tensor"]):
    """Every tensor of a model folder by name; each access reads that tensor from disk.

    Example:
        shards = Shards.open(Path("my-model"))
        shards.infos["model.norm.weight"].shape, shards["model.norm.weight"]
    """

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = dict(infos)

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Validate the headers of every shard of a folder.

        Raises:
            DataError: TOK46 no weights, a shard missing, or an index that disagrees with its shards; TOK47 a damaged
                file; TOK48 a dtype that does not load here.
        """
        if (folder / INDEX).is_file():
            infos = _indexed(folder)
        elif (folder / SINGLE).is_file():
            infos = read_header(folder / SINGLE)
        else:
            raise _no_weights(folder)
        infos = _experts_apart(_with_nf4(_with_values(infos, folder)), folder)
        return cls({name: info for name, info in infos.items() if not name.endswith(COMPUTED)})

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self.infos[name]
        return _read(info) if info.stored is None else info.stored.values(_read)

    def stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers and scales of a quantised weight; None of another, and of a name that is not here.

        None too of nf4 whose blocks do not lie within rows.
        """
        info = self.infos.get(name)
        return None if info is None or info.stored is None else info.stored.parts(_read)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def _read(info: TensorInfo) -> torch.Tensor:
    """A tensor as it is stored."""
    import torch

    tensor = torch.empty(info.shape, dtype=getattr(torch, TORCH_NAMES[info.dtype]))
    if info.end == info.begin:
        return tensor
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.begin)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise damaged(info.file, f"the file ends inside tensor {info.name}")
                done += count
    except OSError as error:
        raise damaged(info.file, f"tensor {info.name} cannot be read: {error}") from error
    return tensor


STACKS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
STACKING = ("qwen3_5_moe",)
"""Families whose published folders hold the experts of a layer in two tensors."""
COMPUTED = ".rotary_emb.inv_freq"
"""Frequencies that some folders store beside their weights; models compute them."""
PICKLES = ("*.bin", "*.pt", "*.pth")
RESAVE = "from transformers import AutoModelForCausalLM as M; M.from_pretrained('{0}').save_pretrained('{0}')"


def _no_weights(folder: Path) -> DataError:
    """TOK46, with the command that makes what is missing of what is there."""

    def files(*patterns: str) -> list[str]:
        return sorted(path.name for pattern in patterns for path in folder.glob(pattern))

    fix = "save it again with model.save_pretrained(FOLDER); a run may begin with rollout.init_weights=random"
    reason = "found no weights"
    if pickles := files(*PICKLES):
        reason, fix = (
            "{} cannot be trusted: pickles can run any code",
            f'if you trust it: python -c "{RESAVE.format(folder)}"',
        )
    elif others := files("*.gguf"):
        reason, fix = "{} is quantised", f"slime convert gguf-to-hf {folder / others[0]} FOLDER"
    elif others := files("*.safetensors"):
        reason, fix = "{} has its maker's own names of tensors", "fetch the files that transformers loads"
    names = pickles or others
    return DataError(
        f"the model folder has no {SINGLE} and no {INDEX}",
        code="TOK46",
        where=str(folder),
        why=reason.format(", ".join(names[:3])),
        fix=fix,
    )


def header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What a file of these tensors (name, dtype, shape) begins with; their bytes follow, in this order."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    short, place = {name: dtype for dtype, name in TORCH_NAMES.items()}, 0
    for name, dtype, shape in tensors:
        end = place + math.prod(shape) * dtype.itemsize
        kind = short[str(dtype).removeprefix("torch.")]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_names(count: int) -> list[str]:
    """Of the shards of a folder."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, after every offset, shape and size has been checked.

    Raises:
        DataError: TOK47 a damaged file, TOK48 a dtype that does not load here.
    """
    header, start, size = _header_of(file)
    infos = {name: _entry(file, name, item, start) for name, item in header.items() if name != METADATA}
    _check_layout(file, infos, start, size)
    return infos


def read_metadata(file: Path) -> dict[str, Any]:
    """What the header of a safetensors file says beside its tensors.

    Raises:
        DataError: TOK47 a damaged file.
    """
    metadata = _header_of(file)[0].get(METADATA, {})
    if not isinstance(metadata, dict):
        raise damaged(file, f"its {METADATA} is not a JSON object")
    return metadata


def _header_of(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the bytes of tensors begin, and the file's size."""
    size = os.stat(file).st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise damaged(file, f"it has {size} bytes, less than the 8 of a header's length")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise damaged(file, f"its header claims {length} bytes, the file has {size - 8} after the length")
        return _parse(file, stream.read(length)), 8 + length, size


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise damaged(file, "its header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _entry(file: Path, name: str, item: Any, start: int) -> TensorInfo:
    try:
        dtype, shape = item["dtype"], tuple(item["shape"])
        begin, end = item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(file, f"the header's entry of tensor {name} is incomplete") from error
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise damaged(file, f"tensor {name} has shape {shape} and offsets [{begin}, {end}]")
    if dtype not in SIZES:
        raise DataError(
            f"tensor {name} has dtype {dtype}, which cannot be trained here",
            code="TOK48",
            where=str(file),
            why=f"loadable are {', '.join(SIZES)}; quantised weights are not",
            fix="save the model unquantised: model.to(torch.bfloat16).save_pretrained(FOLDER)",
        )
    needed = math.prod(shape) * SIZES[dtype]
    if end - begin != needed:
        raise damaged(file, f"tensor {name} of shape {list(shape)} {dtype} needs {needed} bytes, has {end - begin}")
    return TensorInfo(name=name, file=file, dtype=dtype, shape=shape, begin=start + begin, end=start + end)


def _check_layout(file: Path, infos: Mapping[str, TensorInfo], start: int, size: int) -> None:
    place = start
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        if info.end > size:
            raise damaged(file, f"tensor {info.name} ends at byte {info.end}, the file has {size}: it was cut short")
        if info.begin != place:
            how = "overlaps the one before it" if info.begin < place else "leaves a gap before it"
            raise damaged(file, f"tensor {info.name} {how}: it begins at byte {info.begin}, expected {place}")
        place = info.end
    if place != size:
        raise damaged(file, f"{size - place} bytes after the last tensor belong to none")


def _indexed(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        named = {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(index, f"it has no readable weight_map: {error!r}") from error
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(named.values())):
        if Path(shard).name != shard:
            raise damaged(index, f"it names {shard!r}, which is not a file name inside the folder")
        if not (folder / shard).is_file():
            lost = [name for name, where in named.items() if where == shard]
            raise DataError(
                f"{len(lost)} tensors are missing with the shard {shard}: {', '.join(lost[:10])}",
                code="TOK46",
                where=str(index),
                fix="fetch the missing file again",
            )
        infos.update(read_header(folder / shard))
    if wrong := sorted(name for name in named if name not in infos or infos[name].file.name != named[name]):
        raise DataError(
            f"{len(wrong)} tensors are not in the shards that the index names: {', '.join(wrong[:10])}",
            code="TOK46",
            where=str(index),
            fix="fetch the folder again, or save it with model.save_pretrained(FOLDER)",
        )
    return infos


def _with_values(infos: dict[str, TensorInfo], folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder, each quantised weight with its scales and under its own name."""
    quantised = [info for info in infos.values() if info.dtype == FP8 or info.name.endswith(PACKED)]
    if not quantised:
        return infos
    form = _form(folder, quantised[0])
    for numbers in quantised:
        name, scales, others = form.names(numbers.name)
        stored = StoredWeight(form, numbers, _scales(numbers, infos.get(scales), form))
        for other in (numbers.name, scales, *others):
            infos.pop(other, None)
        infos[name] = replace(numbers, name=name, dtype="BF16", shape=form.shape(numbers.shape), stored=stored)
    return infos


def _with_nf4(infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a folder, each weight in nf4 with all that it is stored in, and under its own name."""
    for state in [info for info in infos.values() if info.name.endswith(STATE)]:
        name = state.name.removesuffix(STATE)
        del infos[state.name]
        parts = {part: infos.pop(name + part, None) for part in PARTS}
        try:
            stored = Nf4Weight.of(parts, bytes(_read(state).numpy()))
        except (ValueError, KeyError, TypeError) as error:
            raise _unfit(name, state.file, f"{error}") from error
        infos[name] = replace(stored.numbers, name=name, dtype=DTYPES[stored.dtype], shape=stored.shape, stored=stored)
    return infos


def _experts_apart(infos: dict[str, TensorInfo], folder: Path) -> dict[str, TensorInfo]:
    """The tensors of a folder, a stack of experts as a tensor each: [E, 2 I, H] is gate over up, [E, H, I] down."""
    stacks = [info for info in infos.values() if len(info.shape) == 3 and info.name.endswith(STACKS)]
    if not stacks or json.loads((folder / "config.json").read_bytes()).get("model_type") not in STACKING:
        return infos
    for stack in stacks:
        del infos[stack.name]
        prefix, _, last = stack.name.rpartition(".")
        names = ("down",) if last == "down_proj" else ("gate", "up")
        for expert in range(stack.shape[0]):
            one = stack.rows(expert, 1)
            matrices, height = replace(one, shape=one.shape[1:]), one.shape[1] // len(names)
            for number, which in enumerate(names):
                name = f"{prefix}.{expert}.{which}_proj.weight"
                infos[name] = replace(matrices.rows(number * height, height), name=name)
    return infos


def _form(folder: Path, weight: TensorInfo) -> BlockFormat | PackedFormat:
    try:
        form = storage_form(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):
        form = None
    if not isinstance(form, BlockFormat if weight.dtype == FP8 else PackedFormat):
        raise DataError(
            f"tensor {weight.name} is {weight.dtype}, and config.json does not say how it is quantised",
            code="TOK48",
            where=str(folder / "config.json"),
            why='loadable is "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, and '
            f"{PackedFormat.form}",
            fix="fetch config.json again, or name the folder of the float weights",
        )
    return form


def _scales(numbers: TensorInfo, scales: TensorInfo | None, form: BlockFormat | PackedFormat) -> TensorInfo:
    """The scales of a quantised weight, after dtype and shape have been checked."""
    reason = ""
    if len(numbers.shape) != 2:
        reason = f"it has shape {list(numbers.shape)}, and scales are of matrices"
    elif scales is None:
        reason = f"there is no {form.names(numbers.name)[1]}"
    elif scales.shape != (shape := form.scale_shape(form.shape(numbers.shape))):
        reason = f"{scales.name} has shape {list(scales.shape)}; {form.form} needs {list(shape)}"
    elif scales.dtype not in ("F32", "F16", "BF16"):
        reason = f"{scales.name} is {scales.dtype}"
    if scales is None or reason:
        raise _unfit(numbers.name, numbers.file, reason)
    return scales


def _unfit(name: str, file: Path, reason: str) -> DataError:
    return DataError(
        f"tensor {name} is quantised and has no scales that fit",
        code="TOK46",
        where=str(file),
        why=reason,
        fix="fetch the folder again, or name that of the float weights",
    )


def damaged(file: Path, why: str) -> DataError:
    """TOK47."""
    return DataError(
        f"{file.name} is damaged",
        code="TOK47",
        where=str(file),
        why=why,
        fix="fetch or save the file again",
    )
