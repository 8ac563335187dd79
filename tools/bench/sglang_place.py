"""What the SGLang benchmarks share: where SGLang is, model folders of a seed, and a config that starts it.

place = Place.find()                    SLIME_SGLANG_PYTHON, or SGLANG_SITE (the GPU machine), or .venv-sglang
folder = make_folder(path, "4B")        config, tokenizer and bfloat16 weights drawn from the seed on the GPU
config = place.config(folder, ...)      [sglang] options of a CPU or of a GPU beside the recipe's keys
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_core.backends import EngineStart
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import load_config
from slime_core.config.schema import Config
from slime_core.errors import EngineError
from slime_core.testing.models import char_tokenizer
from slime_core.weights.folder import ModelFolder
from slime_sglang.engine import SglangEngine
from slime_sglang.start import sglang_engines

ROOT = Path(__file__).resolve().parents[2]

QWEN3: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        **QWEN3,
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        **QWEN3,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        **QWEN3,
        **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"norm_topk_prob": True, "tie_word_embeddings": False},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}
SHAPES["small-moe"] = {
    **SHAPES["0.6B"],
    **{"num_hidden_layers": 8, "vocab_size": 512, "norm_topk_prob": True, "tie_word_embeddings": False},
    **{"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
}
SHAPES["tiny-moe"] = {
    **SHAPES["tiny"],
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
}
"""Qwen3 shapes; embeddings are tied where the released model of that size has them so."""

SHARD = 5 << 30  # bytes of a file of weights
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"

NO_SGLANG = "no SGLang here: SLIME_SGLANG_PYTHON names the python of an environment that has it"
CPU_OPTIONS = {"mem_fraction_static": 0.2, "max_total_tokens": 20000}
GPU_OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none"}
GPU_OPTIONS |= {"skip_server_warmup": True}
"""Beside those that slime sets by itself. What the attention backends of SGLang's own choice need is not small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An environment with SGLang: its python, what its processes need in their environment, and the device it uses."""

    python: str
    env: Mapping[str, str]
    device: str  # "cpu" or "cuda"

    @classmethod
    def to_measure(cls, *, smoke: bool) -> Place | None:
        """Where a benchmark runs; None, and said, where nothing can be measured."""
        place = cls.find("cpu" if smoke else "auto")
        if place is None:
            print(f"{NO_SGLANG}; nothing was measured")
        elif place.device == "cpu" and not smoke:
            print("no GPU here: --smoke is what runs on a CPU; nothing was measured")
            return None
        return place

    @classmethod
    def find(cls, device: str = "auto") -> Place | None:
        """SGLang of this machine; None where there is none."""
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        env = {"HF_HUB_OFFLINE": "1"}
        if device == "cpu":
            env["OMP_NUM_THREADS"] = "1"
        if site := os.environ.get("SGLANG_SITE", ""):
            env["PYTHONPATH"] = site
        if device == "cuda" and (folder := _cuda_runtime()):
            env["LD_LIBRARY_PATH"] = os.pathsep.join([folder, os.environ.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep)
        own = ROOT / ".venv-sglang" / "bin" / "python"
        python = os.environ.get("SLIME_SGLANG_PYTHON", "") or (str(own) if own.exists() else sys.executable)
        found = subprocess.run(
            [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"],
            env={**os.environ, **env},
            capture_output=True,
            check=False,
        )
        return cls(python=python, env=env, device=device) if found.returncode == 0 else None

    def config(self, folder: Path, *flags: str, sglang: Mapping[str, Any] | None = None) -> Config:
        """A run's config with SGLang as the engine; ``sglang`` adds to and replaces this device's options."""
        options = {**(CPU_OPTIONS if self.device == "cpu" else GPU_OPTIONS), **(sglang or {})}
        table = {"python": self.python, "env": dict(self.env), **options}
        recipe = folder.parent / f"{folder.name}.toml"
        lines = [f"{name} = {_toml(value)}" for name, value in table.items() if value is not None]
        recipe.write_text("\n".join(['name = "bench"', "[sglang]", *lines, ""]))
        made = ("--hf-checkpoint", str(folder), "--rollout-engine", "sglang", "--device", self.device)
        return load_config(recipe, [*made, *flags])


@dataclass(slots=True, kw_only=True)
class Served:
    """An engine over one server that runs, and how to ask that server beside the engine."""

    engine: SglangEngine
    url: str
    token: str
    vocab_size: int
    config: Config
    sglang: str  # its version
    device: str

    async def flush(self, patience: float = 10.0) -> None:
        """Drop the server's prefix cache; it is idle, or about to be."""
        deadline = time.monotonic() + patience
        while True:
            try:
                return await self.engine.router.lanes[0].client.flush()
            except EngineError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(
    config: Config, run_dir: Path, *, token: str = "", fixed: bool = False, epoch: int = 1
) -> AsyncIterator[Served]:
    """The engine of a config with one server: started here, or another's where the config names its address.

    With ``fixed`` it serves the folder's weights as version 0; else nothing until its first load.
    """
    config = resolve_machine(config)
    rollout = config.rollout
    folder = ModelFolder.open(rollout.hf_checkpoint, init_weights=rollout.init_weights)
    if token:
        os.environ[rollout.rollout_engine_token_env] = token
    run_dir.mkdir(parents=True, exist_ok=True)

    def note(text: str) -> None:
        print(f"  {text}", flush=True)

    try:
        start = EngineStart(config=config, folder=folder, run_dir=run_dir, epoch=epoch, note=note, fixed=fixed)
        async with sglang_engines(start) as running:
            client = running.engine.router.lanes[0].client
            facts = await client.server_info()
            yield Served(
                engine=running.engine,
                url=client.address.url,
                token=client.address.token,
                vocab_size=folder.vocab_size,
                config=config,
                sglang=str(facts.get("version", "")),
                device=config.cluster.device,
            )
    except BaseException:
        for log in sorted((run_dir / "log").glob("*.log")):
            print(f"  -- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-25:], sep="\n  ")
        raise


def scratch(size: int) -> str | None:
    """Where ``size`` bytes of files go: memory, where it holds them; else the usual place for temporary files."""
    try:
        return "/dev/shm" if shutil.disk_usage("/dev/shm").free > size else None
    except OSError:
        return None


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def _cuda_runtime() -> str:
    """The folder of libcudart where torch brought it: SGLang's memory saver is preloaded before any path is set."""
    for base in (Path(torch.__file__).parent.parent / "nvidia",):
        for found in sorted(base.rglob("libcudart.so.*")):
            return str(found.parent)
    return ""


def skeleton(shape: str, **values: Any) -> Any:
    """transformers' model of a shape, without weights; ``values`` are more of its config."""
    import transformers

    of_experts = "num_experts" in SHAPES[shape]
    kind: Any = transformers.Qwen3MoeConfig if of_experts else transformers.Qwen3Config
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            kind(**{"tie_word_embeddings": True, **SHAPES[shape]}, **values)
        )


def make_folder(path: Path, shape: str, *, seed: int = 0, context_len: int = 4096) -> Path:
    """Write a model folder of a shape with weights of a seed: float32 for ``tiny``, else bfloat16.

    The weights are drawn on the GPU where there is one: other values than on a CPU, the same at every call. Where
    SLIME_BENCH_MODELS names a folder, the model is made there once, and ``path`` is a link to it.
    """
    if keep := os.environ.get("SLIME_BENCH_MODELS", ""):
        made = Path(keep) / f"{shape}-{seed}-{context_len}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(made)
        if any((made / name).is_file() for name in (WHOLE, INDEX)):  # put there last of all
            return path
    path.resolve().mkdir(parents=True, exist_ok=True)
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(str(path))
    model = skeleton(
        shape,
        max_position_embeddings=context_len,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    dtype = torch.float32 if shape.startswith("tiny") else torch.bfloat16
    model.config.architectures, model.config.dtype = [type(model).__name__], dtype
    model.config.save_pretrained(str(path))
    device = "cuda" if torch.cuda.is_available() and dtype != torch.float32 else "cpu"
    draw = torch.Generator(device).manual_seed(seed)
    shards: list[list[str]] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
        drawn = drawn.fill_(1.0) if parameter.ndim == 1 else drawn.normal_(0.0, 0.02, generator=draw)
        tensors.update(published(name, drawn.cpu()))
        if sum(tensor.nbytes for tensor in tensors.values()) > SHARD:
            shards.append(write_shard(path, len(shards), tensors))
            tensors = {}
    shards.append(write_shard(path, len(shards), tensors))
    if len(shards) == 1:
        shard_file(path, 0).rename(path / WHOLE)
        return path
    places = {name: shard_file(path, number).name for number, names in enumerate(shards) for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter under the names of released checkpoints, which have each expert's matrices apart."""
    base, _, kind = name.rpartition(".")
    if not base.endswith(".experts"):
        yield name, tensor
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    for expert, whole in enumerate(tensor):
        for part, matrix in zip(parts, whole.chunk(len(parts)), strict=True):
            yield f"{base}.{expert}.{part}.weight", matrix.contiguous()


def shard_file(path: Path, number: int) -> Path:
    """The file of a shard."""
    return path / f"model-{number + 1:05}.safetensors"


def write_shard(path: Path, number: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Write one file of weights, whole or not at all; its names."""
    from safetensors.torch import save_file

    aside = path / f"shard-{os.getpid()}.tmp"
    save_file(tensors, str(aside), metadata={"format": "pt"})
    aside.rename(shard_file(path, number))
    return list(tensors)
