"""Seconds from `publish` to the first token of the new version, by stage and transport, beside what copying costs.

    python tools/bench/bench_weight_sync.py  # one GPU: Qwen3-4B shape, tensor and disk
    python tools/bench/bench_weight_sync.py --offload  # and engine and trainer giving each other their memory
    python tools/bench/bench_weight_sync.py --transports nccl  # two GPUs: the trainer on one, the server on the other
    python tools/bench/bench_weight_sync.py --prefill-graphs  # SGLang's prefill in CUDA graphs: see below
    python tools/bench/bench_weight_sync.py --transports nccl --shape 30B-A3B --ranks 2 --engine-gpus 2  # four GPUs
    python tools/bench/bench_weight_sync.py --transports tensor --lora-rank 32 --lora-sync adapter  # or merged
    python tools/bench/bench_weight_sync.py --sums --shape 30B-A3B  # no server: the trainer's checksums of all tensors
    python tools/bench/bench_weight_sync.py --smoke  # what a CPU can: a tiny model; --sums --smoke too

The real trainer (float32 masters, bfloat16 compute) and the real server stand side by side; the server's KV cache is
there and it serves between updates. A round is

    route -> publish -> load -> one token asked for, and its version looked at

and the clock runs from publish to that token. Stages are measured inside of it: ``cast`` into the buffer (or ``write``
of the folder), ``hash`` of the tensors of the rolling canary, ``update`` the POST of the update (all buckets; SGLang
flushes its cache within), ``control`` other calls (pause, continue), ``first token``. ``rest`` is what is left of the
total. ``canary`` comes after the clock: asking the server for its checksums. So does ``next token``: the same request
once more, of the same version. What the first token takes beyond it is what the update left behind on the server (a
flushed cache, a scheduler that waits); what both take is that server's prefill and its way through HTTP. A prefill of
three tokens without CUDA graphs is the launching of every kernel of every layer: ``--prefill-graphs`` captures one.

``--sums`` takes the checksums that the canary compares, of tensors that lie in buckets as the tensor transport sends
them: of all tensors, as at a stage's start and at checkpoints, and of a rolling step's.

Bounds, measured on this machine between the rounds: for tensor and nccl the bytes of the engine's weights copied once
within the GPU; for disk the same bytes written into a plain file of the same folder and read back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang_place import SHAPES, Place, Served, make_folder, scratch, serving, skeleton

from slime_core.clusters.colocation import MemorySwapping
from slime_core.clusters.machine import resolve_machine
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.schema import Config
from slime_core.plugins import load_plugins
from slime_core.protocols import Trainer
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.trainers.fsdp.adapters import MergedWeights
from slime_core.trainers.fsdp.publishing import sources_of
from slime_core.types import GenerateRequest, SamplingParams, WeightCheck, WeightRoute
from slime_core.weights.canary import Choice
from slime_core.weights.folder import ModelFolder
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.transports import buckets, disk
from slime_sglang.client import Client
from slime_sglang.hashing import KINDS
from slime_sglang.layout import layout
from slime_sglang.start import agree

PREFILL_GRAPHS: dict[str, dict[str, Any]] = {
    "piecewise": {"piecewise_cuda_graph_tokens": [4, 8], "piecewise_cuda_graph_max_tokens": 8},
    "breakable": {
        **{"piecewise_cuda_graph_tokens": [4, 8], "piecewise_cuda_graph_max_tokens": 8},
        **{"enable_breakable_cuda_graph": True},
    },
}
"""SGLang's own ways to a prefill in CUDA graphs, for so many tokens as the measured request has; names of 0.5.12."""

STAGES = ("cast", "write", "hash", "update", "control", "first token", "rest")


@dataclass(slots=True)
class Rounds:
    """Seconds of each round of a transport, by stage; ``total`` is from publish to the first token."""

    transport: str
    total: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    canary: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)  # a token more
    stages: dict[str, list[float]] = field(default_factory=dict)
    bound: float = 0.0
    what: str = ""
    sent: str = ""
    target: str = "reported"


class Watch:
    """Adds up what wrapped functions take, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def add(self, stage: str, seconds: float) -> None:
        """Count it."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextmanager
    def on(self) -> Iterator[None]:
        """Wrap the functions of the stages inside the block."""
        kept: list[tuple[Any, str, Any]] = []

        def wrap(owner: Any, name: str, stage: str) -> None:
            inner = getattr(owner, name)
            kept.append((owner, name, inner))

            def timed(*args: Any, **kwargs: Any) -> Any:
                if self._inside:  # a part of a stage that is being timed
                    return inner(*args, **kwargs)
                start, self._inside = time.perf_counter(), True
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._inside = False
                    self.add(stage, time.perf_counter() - start)

            setattr(owner, name, timed)

        wrap(buckets.Staging, "fill", "cast")
        wrap(buckets.Tally, "add_all", "hash")
        wrap(buckets.Tally, "finish", "hash")
        wrap(disk.DiskSender, "_write", "write")
        inner = Client.post
        kept.append((Client, "post", inner))

        async def post(client: Client, path: str, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return await inner(client, path, *args, **kwargs)
            finally:
                update = "update_weights" in path or "lora" in path
            self.add("update" if update else "control", time.perf_counter() - start)

        Client.post = post  # type: ignore[method-assign]
        try:
            yield
        finally:
            for owner, name, value in kept:
                setattr(owner, name, value)


async def first_token(served: Served, version: int, name: str = "first") -> None:
    """One token, which must be of ``version``."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    tokens = [5, 6, 7] if name == "first" else [8, 9, 10]  # nothing of one is in the cache for the other
    done = await served.engine.generate(
        GenerateRequest(id=f"{name}-{version}-x", tokens=tokens, params=params, seed=0)
    )
    if list(done.versions) != [version]:
        raise SystemExit(f"the first token is of version {list(done.versions)}, not {version}")


async def one_round(found: Rounds, served: Served, trainer: Trainer, version: int, *, count: bool) -> None:
    """One update; the first of a transport makes buffers and groups, and does not count."""
    watch = Watch()
    route = await served.engine.route("rolling")
    if route is None or route.transport != found.transport:
        raise SystemExit(f"the engine's route is {route and route.transport}, not {found.transport}")
    with watch.on():
        begin = time.perf_counter()
        update = await trainer.publish(version, route)
        published = time.perf_counter()
        await served.engine.load(update)
        loaded = time.perf_counter()
        await first_token(served, version)
        end = time.perf_counter()
    await first_token(served, version, "next")
    later = time.perf_counter() - end
    start = time.perf_counter()
    held = await served.engine.fingerprints()
    canary = time.perf_counter() - start
    if wrong := [name for name, value in update.fingerprints.items() if "#" not in name and held.get(name) != value]:
        raise SystemExit(f"{found.transport}: the server's tensors differ: {wrong[:5]}")
    if not count:
        print(f"  {found.transport}: the first update, with its buffers: {end - begin:.3f} s", flush=True)
        return
    watch.seconds["first token"] = end - loaded
    watch.seconds["rest"] = end - begin - sum(watch.seconds.values())
    found.total.append(end - begin)
    found.publish.append(published - begin)
    found.load.append(loaded - published)
    found.canary.append(canary)
    found.later.append(later)
    for stage, seconds in watch.seconds.items():
        found.stages.setdefault(stage, []).append(seconds)


def copy_bound(size: int, device: torch.device | str) -> float:
    """Seconds to copy ``size`` bytes within the device's memory: the best of a few."""
    source = torch.empty(min(size, 2 << 30), dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * size / source.numel()


def disk_bound(size: int, folder: Path) -> tuple[float, float]:
    """Seconds to write and to read ``size`` bytes in a plain file of the folder, 32 MiB at a time, best of two."""
    piece, file = os.urandom(32 << 20), folder / "plain.bin"
    space, writes, reads = bytearray(len(piece)), [], []
    for _ in range(2):
        start = time.perf_counter()
        with file.open("wb", buffering=0) as out:
            for done in range(0, size, len(piece)):
                out.write(piece[: size - done])
        writes.append(time.perf_counter() - start)
        start = time.perf_counter()
        with file.open("rb", buffering=0) as source:
            while source.readinto(space):
                pass
        reads.append(time.perf_counter() - start)
        file.unlink()
    return min(writes), min(reads)


@asynccontextmanager
async def training(config: Config, folder: Path, thread: TorchThread, place: Place, run_dir: Path) -> Any:
    """The real trainer of the folder's weights, here or in ranks; it takes no step, so it has no moments."""
    world, device, plugins = config.cluster.actor_num_gpus_per_node, place.device, load_plugins(config)
    if world == 1:
        model = ModelFolder.open(folder)
        yield await asyncio.to_thread(FsdpTrainer, config, plugins, model, thread=thread, device=device, epoch=1)
        return
    cluster = config.cluster.model_copy(update={"device": device, "cpu_threads": 4})
    settled = resolve_machine(config.model_copy(update={"cluster": cluster}))
    run_dir.mkdir(parents=True, exist_ok=True)
    more = {"world": world, "run_dir": run_dir, "epoch": 1}
    async with RankTrainer(settled, plugins, **more) as ranks:
        yield ranks


def config_of(args: argparse.Namespace, place: Place, folder: Path, transport: str, served: Served | None) -> Config:
    """The config of a transport; servers are those of ``served`` where it is given."""
    flags = ["--update-weight-transport", transport, "--save-interval", "0"]
    flags += ["--update-weight-disk-dir", str(folder.parent / "weights")]
    if args.lora_rank:
        flags += ["--lora-rank", str(args.lora_rank), "--lora-sync", args.lora_sync]
    options: dict[str, Any] = {}
    if place.device == "cuda":
        options |= {"mem_fraction_static": args.mem_fraction, "max_total_tokens": args.kv_tokens}
        options |= {"disable_cuda_graph": True}
        if args.prefill_graphs:
            options |= PREFILL_GRAPHS[args.prefill_graphs]
        else:
            options |= {"disable_piecewise_cuda_graph": True}
    if transport == "nccl" and place.device == "cuda":
        flags += ["--no-colocate", "--rollout-num-gpus", str(args.engine_gpus)]
        flags += ["--rollout-num-gpus-per-engine", str(args.engine_gpus)]
    flags += ["--actor-num-gpus-per-node", str(args.ranks)]
    if served is not None:
        flags += ["--rollout-external-engine-addrs", served.url]
        options = {}
    return place.config(folder, *flags, sglang=options)


async def swap(served: Served, trainer: Trainer, version: int, rounds: int, free: Callable[[], int]) -> Any:
    """Whole turns of engine and trainer on one device; the metrics of each but the first."""
    devices, found = MemorySwapping(served.engine, trainer, free=free), []
    for number in range(rounds + 1):
        async with devices.training():
            pass
        async with devices.syncing():
            version += 1
            await served.engine.load(await trainer.publish(version, await served.engine.route("none")))
        await first_token(served, version)
        found += [dict(devices.metrics)] if number else []
    return found


async def bench(args: argparse.Namespace, place: Place, folder: Path) -> None:
    """Server and trainer start beside each other; then one transport after another."""
    thread = TorchThread(4 if place.device == "cuda" else 1)
    first = args.transports[0]
    config = config_of(args, place, folder, first, None)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    agree(resolve_machine(config), os.environ)  # before the first rank starts
    begin = time.perf_counter()
    async with AsyncExitStack() as stack:
        server = stack.enter_async_context(serving(config, folder.parent / "run"))
        trainer = stack.enter_async_context(training(config, folder, thread, place, folder.parent / "ranks"))
        served, trainer = await asyncio.gather(server, trainer)
        print(f"  ready after {time.perf_counter() - begin:.0f} s; SGLang {served.sglang}", flush=True)
        await trainer.begin(config)
        results, version = [], 0
        for transport in args.transports:
            alone = args.lora_rank and args.lora_sync == "adapter"
            found = Rounds(
                transport, sent=f"adapters of rank {args.lora_rank}" if alone else f"update of {size / 1e9:.2f} GB"
            )
            if transport == "tensor":
                found.target = "0.02 s" if alone else "0.05 s"
            results.append(found)
            if transport == first:
                version = await rounds_of(args.rounds, found, served, trainer, version)
            else:
                other = config_of(args, place, folder, transport, served)
                async with serving(other, folder.parent / f"run-{transport}", token=served.token) as again:
                    version = await rounds_of(args.rounds, found, again, trainer, version)
            bound_of(found, size, folder.parent, place.device)
            show(found, size)
        if args.offload:
            moved = await swap(served, trainer, version, 2, lambda: int(torch.cuda.mem_get_info()[0]))
            show_swap(moved)
        summary(results, size, place)
    thread.close()


async def rounds_of(rounds: int, found: Rounds, served: Served, trainer: Trainer, version: int) -> int:
    """All rounds of a transport; the version that is served afterwards."""
    for number in range((min(rounds, 3) if found.transport == "disk" else rounds) + 1):
        version += 1
        await one_round(found, served, trainer, version, count=number > 0)
    return version


def engine_names(config: Any) -> list[str]:
    """What SGLang calls the tensors of a shape."""
    mlp = ("gate", "experts.w13_", "experts.w2_") if hasattr(config, "num_experts") else ("gate_up_proj", "down_proj")
    parts = [f"self_attn.{name}.weight" for name in ("qkv_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"{norm}_layernorm.weight" for norm in ("input", "post_attention")]
    parts += [f"mlp.{name}{'' if name.endswith('_') else '.'}weight" for name in mlp]
    names = [f"model.layers.{number}.{part}" for number in range(config.num_hidden_layers) for part in parts]
    ends = ["model.embed_tokens.weight", "model.norm.weight"]
    return [*names, *ends, *([] if config.tie_word_embeddings else ["lm_head.weight"])]


def sums(shape: str, device: str, ranks: int, rounds: int) -> None:
    """Checksums of a shape's tensors as ``ranks`` of a server must hold them."""
    model = skeleton(shape)
    weights = MergedWeights(None, dict(model.named_parameters()))
    sources = sources_of(weights, next(model.parameters()).device, FolderLayout(model).parts)
    parts = [part for source in sources for part in source.parts]
    laid_out = buckets.lay_out(parts, "bfloat16", WeightRoute(transport="tensor", dtype="bfloat16").buffer_bytes)
    staging = buckets.Staging(laid_out, lambda size: torch.empty(size, dtype=torch.uint8, device=device).random_(256))
    size = sum(bucket.size for bucket in laid_out)
    choice, seconds = Choice(layout(engine_names(model.config), model.config, ranks)), dict[WeightCheck, list[float]]()
    checks: tuple[WeightCheck, ...] = ("all", "rolling")
    for check in (kind for kind in checks for _ in range(rounds + 1)):
        route = WeightRoute(transport="tensor", dtype="bfloat16", checks=choice.take(check))
        begin = time.perf_counter()
        tally = buckets.Tally(route, KINDS["murmur"])
        tally.add_all(staging.views)
        tally.finish()  # waits for the GPU
        seconds.setdefault(check, []).append(time.perf_counter() - begin)
    every, some = (values[1:] for values in seconds.values())  # the first compiles the kernel
    bound = copy_bound(size, device)
    print(
        f"| checksums of {size / 1e9:.2f} GB, {shape}, {len(parts):,} tensors, as {ranks} ranks hold them | 0.5 s | "
        f"{statistics.median(every):.4f} s ({min(every):.4f} to {max(every):.4f}); "
        f"a rolling step's {statistics.median(some):.4f}; one copy in memory {bound:.4f} s |"
    )


def bound_of(found: Rounds, size: int, folder: Path, device: str) -> None:
    """Measure what the transport is compared with."""
    if found.transport == "disk":
        write, read = disk_bound(size, folder)
        found.bound, found.what = write + read, f"write {write:.3f} s + read {read:.3f} s of a plain file"
    else:
        found.bound = copy_bound(size, device)
        found.what = f"one copy in memory at {size / found.bound / 1e9:,.0f} GB/s"


def show(found: Rounds, size: int) -> None:
    """Stages of a transport."""
    middle = {stage: statistics.median(values) for stage, values in found.stages.items()}
    parts = "  ".join(f"{stage} {middle[stage]:.4f}" for stage in STAGES if stage in middle)
    print(
        f"\n{found.transport}, {size / 1e9:.2f} GB, median of {len(found.total)}: {parts}\n"
        f"  publish {statistics.median(found.publish):.4f}  load {statistics.median(found.load):.4f}  "
        f"after the clock: next token {statistics.median(found.later):.4f}  "
        f"canary {statistics.median(found.canary):.4f}",
        flush=True,
    )
    print(
        f"| {found.sent} by {found.transport}, from publish to the first token | "
        f"{found.target} | {statistics.median(found.total):.4f} s "
        f"({min(found.total):.4f} to {max(found.total):.4f}; publish {statistics.median(found.publish):.4f}, "
        f"load {statistics.median(found.load):.4f}, first token {middle['first token']:.4f}); "
        f"bound {found.bound:.4f} s: {found.what} |",
        flush=True,
    )


def show_swap(moved: list[dict[str, float]]) -> None:
    """Stages of a turn with offload."""
    print(f"\nengine and trainer swap memory, median of {len(moved)}:")
    for name in (name.removesuffix("_seconds") for name in moved[0] if name.endswith("_seconds")):
        seconds = statistics.median(one[f"{name}_seconds"] for one in moved)
        size = statistics.median(one.get(f"{name}_bytes", 0.0) for one in moved)
        print(f"  {name.removeprefix('swap/'):20} {seconds:8.4f} s {size / 1e9:9.2f} GB")


def summary(results: list[Rounds], size: int, place: Place) -> None:
    """The table, last of all."""
    device = torch.cuda.get_device_name() if place.device == "cuda" else "CPU"
    print(f"\n{device}, {size / 1e9:.2f} GB of weights in the engine's dtype, KV cache and masters resident; seconds")
    print(f"{'transport':>9} {'median':>8} {'best':>8} {'worst':>8} {'bound':>8}   bound is")
    for found in results:
        print(
            f"{found.transport:>9} {statistics.median(found.total):8.4f} {min(found.total):8.4f} "
            f"{max(found.total):8.4f} {found.bound:8.4f}   {found.what}"
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4B")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, a GPU each")
    parser.add_argument("--engine-gpus", type=int, default=1, help="of the server, tensor parallel; for nccl")
    parser.add_argument("--transports", nargs="+", choices=("tensor", "disk", "nccl"), default=["tensor", "disk"])
    parser.add_argument("--rounds", type=int, default=7, help="that count; at most 3 of disk")
    parser.add_argument("--offload", action="store_true", help="also whole turns with memory given and taken")
    parser.add_argument("--sums", action="store_true", help="checksums alone, as --engine-gpus ranks hold tensors")
    parser.add_argument("--prefill-graphs", choices=tuple(PREFILL_GRAPHS), default="", help="of SGLang 0.5.12")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters")
    parser.add_argument("--lora-sync", choices=("merged", "adapter"), default="adapter", help="what is sent of them")
    parser.add_argument("--mem-fraction", type=float, default=0.7, help="SGLang's mem_fraction_static")
    parser.add_argument("--kv-tokens", type=int, default=100_000, help="of the KV cache: 14 GB for 4B")
    parser.add_argument("--folder", default="", help="of the model and the disk transport; default: memory if it fits")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds until the whole run is given up")
    parser.add_argument("--smoke", action="store_true", help="the tiny model on a CPU: it proves nothing")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.rounds = "tiny-moe" if "A" in args.shape else "tiny", 3
        args.transports = ["disk"]  # the others move tensors of GPUs
    return args


def main() -> None:
    """Run and print."""
    args = parse()
    if args.sums:
        if not args.smoke and not torch.cuda.is_available():
            raise SystemExit("no GPU here: --smoke is what runs on a CPU; nothing was measured")
        sums(args.shape, "cpu" if args.smoke else "cuda", args.engine_gpus, args.rounds)
        return
    place = Place.to_measure(smoke=args.smoke)
    if place is None:
        return
    with tempfile.TemporaryDirectory(
        dir=args.folder or scratch((80 if args.shape == "30B-A3B" else 36) << 30)
    ) as made:
        begin = time.perf_counter()
        folder = make_folder(Path(made) / "model", args.shape)
        print(f"  {args.shape} folder made in {time.perf_counter() - begin:.0f} s", flush=True)
        work: Awaitable[None] = bench(args, place, folder)
        asyncio.run(asyncio.wait_for(work, args.limit))


if __name__ == "__main__":
    main()
