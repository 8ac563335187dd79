"""What engines ask of a trainer when weights travel: by which road, into which tensors, checked how.

    Engine.route(check) -> WeightRoute -> Trainer.publish(version, route) -> WeightUpdate -> Engine.load

An engine in the trainer's process, or one that reads its memory, has no route: it takes ``WeightUpdate.tensors``. Any
other engine names a transport. The trainer starts it where the weights are (in its ranks), and puts the checksums of
``WeightRoute.checks`` into ``WeightUpdate.fingerprints``: of the bytes that the engine must then hold, in its names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["disk", "tensor", "nccl"]
"""disk: a safetensors folder. tensor: CUDA IPC handles, on one machine. nccl: a broadcast into the servers' ranks."""

Check = Literal["all", "rolling", "none"]
"""Which tensors are compared after an update: every one, the next few in turn, none."""

Checksum = Literal["sha256", "murmur"]
"""sha256: the first 8 bytes, big endian (SGLang on a CPU). murmur: SGLang's 64-bit hash on a GPU."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Piece:
    """Rows (or columns) ``start`` to ``stop`` along ``dim`` of a Hugging Face tensor; ``stop`` -1 is its end.

    With an empty ``name``, ``stop`` rows of zeros, as wide as the piece before.

    Example: Piece(name="model.layers.0.self_attn.q_proj.weight", dim=0, start=0, stop=-1)
    """

    name: str
    dim: int = 0
    start: int = 0
    stop: int = -1


@dataclass(slots=True, frozen=True, kw_only=True)
class Held:
    """One tensor as a rank of an engine holds it: pieces of Hugging Face tensors end to end along ``dim``.

    Example:
        Held(name="model.layers.0.self_attn.qkv_proj.weight", rank=0, pieces=(q, k, v))
    """

    name: str  # the engine's own
    rank: int = 0  # of the engine's tensor-parallel ranks
    pieces: tuple[Piece, ...]
    dim: int = 0

    @property
    def key(self) -> str:
        """Under which its checksum goes: ``NAME``, and ``NAME@RANK`` for ranks after the first."""
        return f"{self.name}@{self.rank}" if self.rank else self.name


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightRoute:
    """How one update travels.

    Example:
        WeightRoute(transport="disk", dtype="bfloat16", folder="runs/demo-1/weights", checksum="sha256", checks=())
    """

    transport: Transport
    dtype: str  # of the engine's tensors: "float32" or "bfloat16"
    folder: str = ""  # disk: where folders v-VERSION are put
    buffer_bytes: int = 512 << 20  # tensor, nccl: of one bucket
    copies: tuple[int, ...] = ()  # tensor: trainer ranks beside 0 whose GPUs servers share: each holds a copy
    address: str = ""  # nccl: HOST:PORT of the rendezvous
    world: int = 0  # nccl: ranks of all servers, and one of the trainer, which is rank 0
    group: str = ""  # nccl: name of the process group
    timeout: float = 600.0  # nccl: seconds until the trainer gives up on servers that do not take the weights
    checksum: Checksum = "sha256"
    checks: tuple[Held, ...] = ()  # tensors whose checksums the update carries
