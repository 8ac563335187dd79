"""GPUs by name: memory, peak rates and bandwidth, each with the maker's document that states it.

Rates are dense: makers advertise twice that with structured sparsity. ``usable`` is what the driver gives a process
(`torch.cuda.mem_get_info` of an empty device), which is less than the marketed memory where ECC or firmware take some.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from slime_core import memory
from slime_core.errors import ConfigError, nearest

GIB, CONTEXT = memory.GIB, memory.CONTEXT


@dataclass(slots=True, frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, or a processor with its main memory.

    Example: gpu_of("h100").memory // GIB == 79
    """

    name: str
    memory: int  # bytes that a process may have
    bf16: float  # FLOP/s of dense products
    fp8: float  # the same; 0 where products in fp8 are not faster
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s to another GPU of the host, one way
    host_link: float  # bytes/s to main memory, one way
    source: str
    capability: tuple[int, int] = (0, 0)  # compute capability
    processor: bool = False  # no GPU

    @property
    def room(self) -> int:
        """Bytes for tensors."""
        return self.memory - (0 if self.processor else CONTEXT)


def _gpu(
    name: str, gib: float, tflops: tuple[float, float], gbs: tuple[float, float, float], capability: float, source: str
) -> Gpu:
    bandwidth, link, host_link = gbs
    return Gpu(
        name=name,
        memory=int(gib * GIB),
        bf16=tflops[0] * 1e12,
        fp8=tflops[1] * 1e12,
        bandwidth=bandwidth * 1e9,
        link=link * 1e9,
        host_link=host_link * 1e9,
        capability=(int(capability), round(capability * 10) % 10),
        source=source,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.1, (989, 1979), (3350, 450, 55), 9.0, "NVIDIA H100 datasheet, SXM5 80 GB"),
        _gpu("h200", 139.8, (989, 1979), (4800, 450, 55), 9.0, "NVIDIA H200 datasheet, SXM5 141 GB"),
        _gpu("h20", 95.0, (148, 296), (4000, 450, 55), 9.0, "NVIDIA H20 datasheet, 96 GB"),
        _gpu("b200", 178.0, (2250, 4500), (7700, 900, 55), 10.0, "NVIDIA DGX B200 datasheet, per GPU"),
        _gpu("a100", 79.1, (312, 0), (2039, 300, 25), 8.0, "NVIDIA A100 datasheet, SXM4 80 GB"),
        _gpu("a100-40", 39.4, (312, 0), (1555, 300, 25), 8.0, "NVIDIA A100 datasheet, SXM4 40 GB"),
        _gpu("l40s", 44.4, (362, 733), (864, 25, 25), 8.9, "NVIDIA L40S datasheet; ECC takes 1/16 of 48 GB"),
        _gpu("l4", 22.0, (121, 242), (300, 25, 25), 8.9, "NVIDIA L4 datasheet, 24 GB, half of the sparse rates"),
        _gpu("a10", 22.0, (125, 0), (600, 25, 25), 8.6, "NVIDIA A10 datasheet, 24 GB"),
        _gpu("a6000", 47.4, (155, 0), (768, 56, 25), 8.6, "NVIDIA RTX A6000 and GA102 whitepaper, 48 GB"),
        _gpu("5090", 31.3, (209, 419), (1792, 55, 55), 12.0, "NVIDIA RTX Blackwell whitepaper, float32 sums"),
        _gpu("4090", 23.5, (165, 330), (1008, 25, 25), 8.9, "NVIDIA Ada whitepaper, appendix A, float32 sums"),
        _gpu("3090", 23.5, (71, 0), (936, 56, 25), 8.6, "NVIDIA GA102 whitepaper, appendix A, float32 sums"),
    )
}
"""PCIe 5 x16 gives 55 GB/s one way in practice, PCIe 4 x16 25; NVLink one way is half of the marketed sum."""


def gpu_of(text: str) -> Gpu:
    """A GPU by name, ``NAME=GiB`` with other memory, or ``GPU=GiB`` of which only the memory is known.

    Raises:
        ConfigError: CFG03 no such name, or no number of GiB.
    """
    name, equals, size = text.strip().lower().partition("=")
    name = re.sub(r"^(nvidia[ -]?)?(geforce[ -]?)?(rtx[ -]?)?", "", name) or name
    base = GPUS["a100"] if name == "gpu" else GPUS.get(name)
    try:
        memory = float(size.removesuffix("gib").removesuffix("gb")) if equals else 0.0
    except ValueError:
        memory = -1.0
    if base is None or memory < 0 or (equals and memory == 0) or (name == "gpu" and not equals):
        raise ConfigError(
            f"--gpu {text} is not known",
            code="CFG03",
            where="--gpu",
            why=f"known are {', '.join(GPUS)}, each also as NAME=GiB; gpu=GiB is any other, with the rates of an A100",
            fix=nearest(name, list(GPUS)) or "--gpu h100   or   --gpu gpu=24",
        )
    if not equals:
        return base
    label = f"{name} of {memory:g} GiB"
    return replace(base, name=label, memory=int(memory * GIB))


def of_machine() -> tuple[str, int] | None:
    """Name and bytes of this machine's first GPU, as its driver says; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout
    name, _, mib = answer.partition("\n")[0].rpartition(",")
    return (name, int(mib) << 20) if mib.strip().isdigit() else None


def processor(memory: int) -> Gpu:
    """A machine without a GPU, of ``memory`` bytes: its rates are not known."""
    return Gpu(
        name="cpu",
        memory=memory,
        bf16=0,
        fp8=0,
        bandwidth=0,
        link=0,
        host_link=0,
        source="this machine",
        processor=True,
    )
