"""Small pictures of samples."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from slime_core.errors import DataError
from slime_core.media.references import NO_ADDRESS, MediaLimits, data_uri, picture, read, shown

SIDE = 224  # pixels of the longer one
COUNT = 512  # of those that are kept


class Thumbnails:
    """Pictures by reference, made small once; one that cannot be read is tried again.

    Args:
        config: of the run, by full names: it says how large a picture may be.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._limits = MediaLimits(
            pixels=config.get("data.max_image_pixels", NO_ADDRESS.pixels),
            nbytes=config.get("data.max_media_bytes", NO_ADDRESS.nbytes),
        )
        self.pictures: OrderedDict[bytes, str] = OrderedDict()  # by digest: a reference can be a whole file

    def of(self, reference: str) -> str:
        """A small picture as a data URI, or what is in the way of one."""
        key = blake2b(reference.encode(), digest_size=16).digest()
        if key not in self.pictures:
            try:
                image = picture(read(reference, limits=self._limits), shown(reference), limits=self._limits)
            except DataError as error:
                return f"{error.what}: {error.why}"
            image.thumbnail((SIDE, SIDE))
            buffer = io.BytesIO()
            image.save(buffer, format="JPEG", quality=80)
            if len(self.pictures) == COUNT:
                self.pictures.popitem(last=False)
            self.pictures[key] = data_uri(buffer.getvalue())
        return self.pictures[key]
