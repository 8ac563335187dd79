"""A plan's memory, batch, time and advice as JSON-ready facts and as tables, for `slime plan` and `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_cli.tables import heading, print_pairs, print_table
from slime_core.config.load import stage_name
from slime_core.planning.advice import advice, beyond, splits
from slime_core.planning.batch import BatchPlan
from slime_core.planning.footprint import PHASES
from slime_core.planning.gpus import CONTEXT, GIB
from slime_core.planning.memory import MemoryPlan, swapped
from slime_core.planning.time import TimePlan

if TYPE_CHECKING:
    from slime_core.planning.memory import DeviceMemory, StagePlan

MARKS = {"rollout": "generating", "score": "scoring", "train": "training", "update": "optimizer", "sync": "weights"}
SHOWN_SPLITS = 4


def facts(plan: MemoryPlan, gpus: int = 0) -> dict[str, Any]:
    """All of a plan, bytes and seconds as numbers.

    Args:
        gpus: that there are, of which a split is looked for; 0 is those of the config
    """
    subject, trainer, engine = plan.subject, plan.trainer, plan.engine
    batch, time = BatchPlan.of(subject.config, subject.lengths), TimePlan.of(plan)
    count = gpus or sum(device.count for device in plan.devices)
    answers = advice(plan)
    return {
        "gpu": {"name": subject.gpu.name, "bytes": subject.gpu.memory, "source": subject.gpu.source},
        "model": {
            "type": subject.sizes.config.model_type,
            "parameters": subject.sizes.parameters,
            "by_kind": subject.sizes.by_kind(),
            "active": subject.sizes.active,
        },
        "lengths": {
            "prompt": subject.lengths.prompt,
            "response": subject.lengths.response,
            "p95": subject.lengths.p95,
            "longest": subject.lengths.longest,
            "source": subject.lengths.source,
        },
        "batch": _batch(plan, batch),
        "devices": [_device(device) for device in plan.devices],
        "stages": [_stage(stage) for stage in plan.stages],
        "fits": plan.fits,
        "short": plan.short,
        "host": {**(trainer.host if trainer else {}), **({"swapped": swapped(subject, plan) // 2} if trainer else {})},
        "cache": {
            "tokens": engine.positions,
            "sequences": engine.sequences,
            "engines": engine.engines,
            "gpus": engine.gpus,
        }
        if engine
        else {},
        "layout": dict(trainer.layout) if trainer else {},
        "time": _time(time) if time else {},
        "advice": [{"text": one.text, "flags": one.flags, "keys": dict(one.keys)} for one in answers],
        "splits": [
            {"trainer": one.trainer, "engine": one.engine, "seconds": one.seconds, "waits": one.waits}
            for one in splits(plan, count)[:SHOWN_SPLITS]
        ],
        "last_resort": "" if plan.fits or answers else _last_resort(plan),
        "notices": list(plan.notices),
    }


def _stage(stage: StagePlan) -> dict[str, Any]:
    return {
        "name": stage_name(stage.subject.config),
        "peak": stage.peak.total if stage.devices else 0,
        "phase": stage.peak.phase if stage.devices else "",
        "short": stage.short,
    }


def _last_resort(plan: MemoryPlan) -> str:
    """What is left where no setting of one GPU makes a run fit."""
    flags = [one.flags for one in beyond(plan)]
    return "fits with " + ", or with ".join(flags) if flags else "more GPUs, or a smaller model"


def _batch(plan: MemoryPlan, batch: BatchPlan) -> dict[str, Any]:
    trainer = plan.trainer
    context = trainer.layout.get("context parallel", 1) if trainer else 1
    return {
        "samples": batch.samples,
        "tokens": round(batch.tokens),
        "computed_tokens": round(batch.computed),
        "optimizer_steps": batch.optimizer_steps,
        "effective_batch": batch.effective_batch,
        "micro_batch_tokens": trainer.tokens if trainer else 0,
        "micro_batches": batch.micro_batches(trainer.tokens * context, trainer.data) if trainer else 0,
        "staleness": batch.stale_steps,
        "off_policy_steps": batch.off_policy_steps,
    }


def _device(device: DeviceMemory) -> dict[str, Any]:
    return {
        "role": device.role,
        "count": device.count,
        "room": device.room,
        "margin": device.margin,
        "short": device.short,
        "peak": device.peak.total,
        "phases": {phase: dict(moment.bytes) for phase, moment in device.phases.items()},
    }


def _time(time: TimePlan) -> dict[str, Any]:
    return {
        "seconds": dict(time.seconds),
        "bound_by": dict(time.bottlenecks),
        "total": time.total,
        "bottleneck": time.bottleneck,
        "overlapped": time.overlapped,
        "measured_gpu": time.measured,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
    }


def gib(size: float) -> str:
    """Bytes as GiB, small ones with more digits."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 or not size else f"{value:.2f}" if value >= 0.01 else "<0.01"


def print_plan(plan: Mapping[str, Any], title: str) -> None:
    """The facts of a plan as tables on stdout."""
    heading(title)
    print_pairs(_head(plan))
    if len(plan["stages"]) > 1:
        heading("stages; the tables have the most of all, batch and seconds are those of the fullest")
        rows = [
            [one["name"], gib(one["peak"]), MARKS.get(one["phase"], ""), gib(one["short"])] for one in plan["stages"]
        ]
        print_table(["", "GiB at the peak", "in", "GiB missing"], rows)
    for device in plan["devices"]:
        _print_memory(device, "a GPU" if _on_gpus(plan) else "main memory")
    print_pairs(_verdict(plan))
    if plan["time"]:
        _print_time(plan["time"])
    if plan["splits"]:
        heading("GPUs of trainer and engine")
        rows = [
            [one["trainer"], one["engine"] or "the same", seconds_text(one["seconds"]), one["waits"]]
            for one in plan["splits"]
        ]
        print_table(["trainer", "engine", "seconds a step", ""], rows)


def _on_gpus(plan: Mapping[str, Any]) -> bool:
    return bool(plan["gpu"]["name"] != "cpu")


def seconds_text(seconds: float) -> str:
    """Three digits, and never a power of ten."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" if seconds >= 0.001 else "<0.001"


def _head(plan: Mapping[str, Any]) -> dict[str, str]:
    model, batch, lengths, gpu = plan["model"], plan["batch"], plan["lengths"], plan["gpu"]
    kinds = ", ".join(f"{kind} {count / 1e6:,.1f} M" for kind, count in model["by_kind"].items())
    count = sum(device["count"] for device in plan["devices"])
    steps = f"{batch['optimizer_steps']} optimizer step{'s' * (batch['optimizer_steps'] > 1)}"
    rows = {
        "GPUs"
        if _on_gpus(plan)
        else "machine": f"{count} x {gpu['name']}, {gib(gpu['bytes'])} GiB each ({gpu['source']})",
        "model": f"{model['type']}, {model['parameters'] / 1e6:,.1f} M parameters: {kinds}",
        "lengths": f"prompt {lengths['prompt']:,.0f}, response {lengths['response']:,.0f} (95 % up to "
        f"{lengths['p95']:,.0f}), longest sequence {lengths['longest']:,} tokens: {lengths['source']}",
        "batch": f"{batch['samples']:,} samples, {batch['tokens']:,} tokens; {steps} of "
        f"{batch['effective_batch']:,} rollouts, {batch['micro_batches']:,} micro-batches a GPU of up to "
        f"{batch['micro_batch_tokens']:,} tokens",
        "staleness": f"{batch['staleness']} steps; at most {batch['off_policy_steps']} optimizer steps between "
        "the weights that drew a sample and those it trains",
    }
    if plan["layout"]:
        rows["layout"] = ", ".join(f"{name} {size}" for name, size in plan["layout"].items())
    return rows


def _print_memory(device: Mapping[str, Any], of: str) -> None:
    heading(f"GiB of {of} of the {device['role']}")
    phases = [phase for phase in PHASES if phase in device["phases"]]
    names = list(dict.fromkeys(name for phase in phases for name in device["phases"][phase]))
    columns = [device["phases"][phase] for phase in phases]
    rows: list[list[Any]] = [
        [name, *(gib(column[name]) if column.get(name) else "" for column in columns)]
        for name in names
        if any(column.get(name) for column in columns)
    ]
    rows.append(["all", *(gib(sum(column.values())) for column in columns)])
    print_table(["", *(MARKS[phase] for phase in phases)], rows)


def _verdict(plan: Mapping[str, Any]) -> dict[str, str]:
    if not plan["devices"]:
        return {"verdict": "nothing is planned: no stage trains or generates with backends that tell their memory"}
    device = max(plan["devices"], key=lambda one: one["short"] or one["peak"] - one["room"])
    room = f"{gib(device['room'])} GiB" + (f" beside {gib(CONTEXT)} of the CUDA context" if _on_gpus(plan) else "")
    margin = f"a margin of {device['margin']:.0%}"
    fits = f"fits: {gib(device['peak'])} GiB at the peak and {margin}, of {room}"
    short = f"does not fit: {gib(device['short'])} GiB are missing, {margin} included, of {room}"
    rows = {"verdict": fits if plan["fits"] else short}
    if cache := plan["cache"]:
        rows["KV cache"] = (
            f"{cache['tokens']:,} tokens an engine: {cache['sequences']:,} of the longest sequences at once"
        )
    if host := {name: size for name, size in plan["host"].items() if size}:
        rows["main memory"] = ", ".join(f"{name} {gib(size)} GiB a rank" for name, size in host.items())
    for number, one in enumerate(plan["advice"], 1):
        rows[f"advice {number}"] = f"{one['text']}: {one['flags']}"
    if not plan["fits"] and not plan["advice"]:
        rows["advice"] = f"no setting of memory alone makes it fit; {plan['last_resort']}"
    for number, text in enumerate(plan["notices"], 1):
        rows[f"notice {number}"] = text
    return rows


def _print_time(time: Mapping[str, Any]) -> None:
    heading("seconds of a step" + (", generating beside training" if time["overlapped"] else ""))
    rows: list[list[Any]] = [
        [name, seconds_text(seconds), time["bound_by"].get(name, "")] for name, seconds in time["seconds"].items()
    ]
    rows.append(["a step", seconds_text(time["total"]), time["bottleneck"]])
    print_table(["", "seconds", "bound by"], rows)
    pairs = {"speed": f"{time['tokens_per_second']:,.0f} response tokens/s, training at an MFU of {time['mfu']:.2f}"}
    if not time["measured_gpu"]:
        pairs["notice"] = "shares of the peaks are those of H100 and H200; on this GPU nothing was measured"
    print_pairs(pairs)
