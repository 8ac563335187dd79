"""Pictures, videos and sounds by reference: from what a row or a function has to bytes and pictures, within limits.

    path, data URI, address, bytes, picture --reference--> path or data URI --read--> bytes --picture--> RGB pixels

A reference is a text that a ledger can keep and read again. A row may name only files below the data's folder, and
addresses only where `data.media_addresses` allows them; a user's function may name any file.
"""

from __future__ import annotations

import base64
import binascii
import io
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np

from slime_core.errors import DataError
from slime_core.types import ArrayRef, MediaInputs, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = {"image": "images", "video": "videos", "audio": "audios"}
"""Kind of media, as slime and chat templates name it, to its key of `multimodal_inputs`."""

FIELDS = ("bytes", "data", "url", "path")
"""Of a reference that is a table: where it lies, or the file itself."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
SOURCE = "slime_reference"  # attribute of a picture that was read for a function
SECONDS = 30.0  # to fetch an address
FIX = "fix the file, or leave such rows out with data.max_bad_rows"


@dataclass(slots=True, frozen=True)
class MediaLimits:
    """What a reference may bring in: nothing larger is decoded, fetched or read."""

    pixels: int = 1 << 26
    nbytes: int = 1 << 26
    addresses: tuple[str, ...] = ()  # what lies at and below them may be fetched


NO_ADDRESS = MediaLimits()


@dataclass(slots=True, frozen=True)
class Access:
    """What a row's references may name: files below a folder, and the addresses that the limits name."""

    folder: Path | None = None
    limits: MediaLimits = NO_ADDRESS


TRUSTED = Access()
"""Of a plugin's own prompts: whatever its code names."""


def kind_of(name: str) -> str:
    """The key of `multimodal_inputs` of a kind: ``images`` of "image", "images" and "image_url"."""
    single = name.removeprefix("input_").removesuffix("_url").removesuffix("s")
    return KINDS.get(single, "")


def checked(value: Any, where: str, access: Access) -> str | list[Any]:
    """A row's reference as an absolute path or a data URI; a list of them (the frames of a video) as a list.

    Raises:
        DataError: DAT33 a file or address that a row may not name, DAT24 no reference, DAT39, DAT40.
    """
    if access is TRUSTED:
        return reference(value, where)
    if isinstance(value, list):
        return [checked(item, where, access) for item in value]
    value = _unwrapped(value)
    if isinstance(value, bytes):
        return data_uri(value)
    if not isinstance(value, str) or not value:
        raise _unusable(value, where)
    if value.startswith("data:"):
        return value
    if is_allowed(value, access.limits.addresses):
        return value
    return str(_below(value, where, access.folder))


def reference(value: Any, where: str = "") -> str | list[Any]:
    """What a function gives - a path, a data URI, bytes, a PIL picture or a list of them - as a reference.

    Raises:
        DataError: DAT24, something else.
    """
    if isinstance(value, (list, tuple)):
        return [reference(item, where) for item in value]
    value = _unwrapped(value)
    if isinstance(value, bytes):
        return data_uri(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "save") and hasattr(value, "convert"):  # a PIL picture, without importing PIL for text
        source, pixels = getattr(value, SOURCE, ("", b""))
        if source and pixels == _digest(value):
            return str(source)
        buffer = io.BytesIO()
        (value if value.mode in ("RGB", "RGBA", "L") else rgb(value)).save(buffer, format="PNG")
        return data_uri(buffer.getvalue())
    if isinstance(value, str) and value:
        return value.removeprefix("file://")
    raise _unusable(value, where)


def with_reference(image: Image, reference: str) -> Image:
    """A picture that :func:`reference` gives back as the reference it was read from, unless its pixels change."""
    setattr(image, SOURCE, (reference, _digest(image)))
    return image


def _digest(image: Image) -> bytes:
    return blake2b(image.tobytes(), digest_size=16).digest()


def data_uri(data: bytes) -> str:
    """``data:TYPE;base64,...`` of a file's bytes."""
    kind = next((kind for head, kind in TYPES.items() if data.startswith(head)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def is_address(reference: str) -> bool:
    """Whether it is fetched from a network."""
    return reference.startswith(("http://", "https://"))


def is_allowed(address: str, allowed: Iterable[str]) -> bool:
    """Whether an address is an allowed one, or lies below its path on the same scheme, host and port.

    One with a user's name is never allowed.
    """
    try:
        place = _place(address)
        return place is not None and any(_lies_below(place, _place(one)) for one in allowed)
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def read(reference: str, where: str = "", limits: MediaLimits = NO_ADDRESS) -> bytes:
    """The bytes of a path's file, of a data URI, or of an address that the limits name.

    Raises:
        DataError: DAT33 another address, DAT39 unreadable, DAT40 more bytes than the limit.
    """
    if is_address(reference):
        return _fetched(reference, where, limits)
    if reference.startswith("data:"):
        head, _, text = reference.partition(",")
        _check_bytes(len(text) * 3 // 4, where, shown(reference), limits)
        try:
            if not head.endswith(";base64"):
                raise ValueError("a data URI holds base64: data:image/png;base64,...")
            return base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as error:
            raise unreadable(shown(reference), where, str(error)) from error
    try:
        with Path(reference).open("rb") as file:
            data = file.read(limits.nbytes + 1)
    except (OSError, ValueError) as error:
        raise unreadable(shown(reference), where, str(error)) from error
    _check_bytes(len(data), where, shown(reference), limits)
    return data


def picture(data: bytes, name: str, where: str = "", limits: MediaLimits = NO_ADDRESS) -> Image:
    """The decoded RGB picture of a file's bytes, turned upright as its EXIF says.

    Raises:
        DataError: DAT39 no picture, or a broken one; DAT40 more pixels than the limit.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > limits.pixels:
            raise over_limit(name, where, f"{width} x {height} pixels", "data.max_image_pixels", limits.pixels)
        image.load()
        return rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # Pillow's own limits
        raise over_limit(name, where, str(error), "data.max_image_pixels", limits.pixels) from error
    except Exception as error:  # decoders raise whatever they meet in a broken file
        raise unreadable(name, where, f"{type(error).__name__}: {error}") from error


def rgb(image: Image) -> Image:
    """A picture in RGB: what is transparent lies on white, 16 bits of grey become 8."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((grey + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def shown(reference: str) -> str:
    """A reference as a message shows it."""
    return reference if len(reference) <= 120 else f"{reference[:40]}... ({len(reference)} characters)"


def parts_of(messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and part of every part of messages that is a picture, a video or a sound, in order."""
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if kind := kind_of_part(part):
                yield kind, part


def kind_of_part(part: Mapping[str, Any]) -> str:
    """The kind of media of a part of a message, by its type or by a key that has a value; "" of a text."""
    if part.get("type") == "text":
        return ""
    filled = (name for name, value in part.items() if value not in (None, ""))
    return kind_of(str(part.get("type", ""))) or next(filter(None, map(kind_of, filled)), "")


def text_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part that is no media without the keys of media, in which chat templates see a picture even where empty."""
    return {name: value for name, value in part.items() if not kind_of(name)}


def value_of(kind: str, part: Mapping[str, Any]) -> Any:
    """What a part of a message refers to; None where it refers to nothing, and the next of a row's column is meant."""
    names = [name for name in part if kind_of(name) == kind]
    values = [part[name] for name in (*names, *FIELDS) if part.get(name) not in (None, "")]
    return values[0] if values else None


def inputs_of(messages: Any, where: str = "") -> MediaInputs:
    """The references of a function's messages, by kind.

    Raises:
        DataError: DAT24.
    """
    inputs: MediaInputs = {}
    for kind, part in parts_of(messages):
        inputs.setdefault(kind, []).append(reference(value_of(kind, part), where))
    return inputs


def flat(items: Iterable[Any]) -> Iterator[Any]:
    """References of a kind, frames of videos one by one."""
    for item in items:
        yield from flat(item) if isinstance(item, list) else [item]


def plain_inputs(inputs: Mapping[str, Any], where: str = "") -> MediaInputs:
    """`multimodal_inputs` as a function filled them, with references that a ledger can keep.

    Raises:
        DataError: DAT24.
    """
    return {kind: [reference(value, where) for value in values] for kind, values in inputs.items() if values}


def plain_sample(sample: Sample) -> None:
    """Make what functions put into a sample's media storable: pictures become references, tensors arrays.

    Raises:
        DataError: DAT24.
    """
    if sample.multimodal_inputs is not None:
        sample.multimodal_inputs = plain_inputs(sample.multimodal_inputs, f"sample {sample.id}") or None
    arrays = sample.multimodal_train_inputs or {}
    if any(not isinstance(array, (ArrayRef, np.ndarray)) for array in arrays.values()):
        sample.multimodal_train_inputs = {
            name: array if isinstance(array, ArrayRef) else np.asarray(array) for name, array in arrays.items()
        }


def unreadable(name: str, where: str, why: str) -> DataError:
    """DAT39."""
    return DataError(f"{name} cannot be decoded", code="DAT39", where=where, why=why, fix=FIX)


def over_limit(name: str, where: str, size: str, key: str, limit: int) -> DataError:
    """DAT40."""
    return DataError(
        f"{name} is too large: {size}",
        code="DAT40",
        where=where,
        why=f"{key} is {limit}; a small file can hold a picture that fills the memory",
        fix=f"make it smaller, raise {key}, or leave such rows out with data.max_bad_rows",
    )


def _unwrapped(value: Any) -> Any:
    """The reference inside a table: ``{"bytes": ..., "path": ...}`` of Parquet, ``{"url": ...}`` of chat messages."""
    while isinstance(value, Mapping):
        value = next((value[key] for key in (*FIELDS, *KINDS) if value.get(key) is not None), None)
    return value


def _unusable(value: Any, where: str) -> DataError:
    return DataError(
        f"a reference to media is {'null' if value is None else f'a {type(value).__name__}'}",
        code="DAT24",
        where=where,
        fix="a reference is a path, data:image/png;base64,..., or a table with bytes, url or path",
    )


def _below(value: str, where: str, folder: Path | None) -> Path:
    """The absolute path of a file below the data's folder."""
    reason, text = "", value
    if "://" in text or (urlsplit(text).scheme and not Path(text).is_absolute()):
        reason = "a row may not make this machine fetch or open an address"
    elif folder is None:
        reason = "such a set has no folder of files"
    elif "\0" in text or ".." in Path(text.replace("\\", "/")).parts or not _inside(folder / text, folder):
        reason = "the path leaves the folder of the data"
    if reason or folder is None:
        raise _refused(value, where, reason)
    return (folder / text).absolute()


def _refused(value: str, where: str, reason: str) -> DataError:
    return DataError(
        f"the row refers to media at {value[:100]!r}",
        code="DAT33",
        where=where,
        why=reason,
        fix="copy the file beside the data and name it by a relative path, or set data.media_folder\n"
        "an address: name it, or its folder, in data.media_addresses",
    )


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _place(address: str) -> tuple[str, str, int | None, str] | None:
    """Scheme, host, port and plain path of an address; None where a user's name is in it, or it is none."""
    if not is_address(address):
        return None
    parts = urlsplit(address)
    if "@" in parts.netloc or not parts.hostname:
        return None
    path = posixpath.normpath("/" + unquote(parts.path).replace("\\", "/").lstrip("/"))
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme], path


def _lies_below(place: tuple[Any, ...], allowed: tuple[Any, ...] | None) -> bool:
    if allowed is None or place[:3] != allowed[:3]:
        return False
    return bool(place[3] == allowed[3] or place[3].startswith(allowed[3].rstrip("/") + "/"))


class _SameAddresses(HTTPRedirectHandler):
    """Follows a redirection only to an address that is allowed too."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    def redirect_request(self, req: Request, *answer: Any) -> Request | None:
        """Raise URLError for another address."""
        target = str(answer[-1])
        if not is_allowed(target, self._addresses):
            answer[0].close()
            raise URLError(f"redirected to {target[:100]}, which data.media_addresses does not allow")
        return super().redirect_request(req, *answer)


def _fetched(address: str, where: str, limits: MediaLimits) -> bytes:
    if not is_allowed(address, limits.addresses):
        raise _refused(address, where, "data.media_addresses does not allow it")
    try:
        with build_opener(_SameAddresses(limits.addresses)).open(address, timeout=SECONDS) as answer:
            data: bytes = answer.read(limits.nbytes + 1)
    except (OSError, ValueError) as error:
        raise unreadable(shown(address), where, str(error)) from error
    _check_bytes(len(data), where, shown(address), limits)
    return data


def _check_bytes(count: int, where: str, name: str, limits: MediaLimits) -> None:
    if count > limits.nbytes:
        raise over_limit(name, where, f"more than {limits.nbytes} bytes", "data.max_media_bytes", limits.nbytes)
