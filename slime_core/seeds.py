"""64-bit seeds by name: every draw of a run is keyed by its purpose, never by its time.

What else draws, a plugin or a library, does so from the process's global generators; these come and go as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any


def seed_of(run_seed: int, *names: str | int) -> int:
    """A 64-bit seed for one purpose, such as ``seed_of(7, "sample", "grpo/17-0", 0)``; the same on every machine."""
    text = "\x1f".join([str(run_seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generators() -> dict[str, Any]:
    """The state of this process's global generators, as JSON: python's, and numpy's and torch's where they are loaded.

    Of CUDA devices it is the current one's, where CUDA was used.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss]}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        name, keys, place, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [name, [int(key) for key in keys], int(place), int(has_gauss), float(cached)]
    if torch is not None:
        states["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = _text(torch.cuda.get_rng_state())
    return states


def set_generators(state: Mapping[str, Any]) -> None:
    """Put the global generators where :func:`generators` found them; what ``state`` does not name stays."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "torch" in state:
        import torch

        torch.set_rng_state(_bytes(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: Any) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
