"""Plugins of one hook, what the hooks are given, and how they are asked."""

import asyncio
from dataclasses import replace

import numpy as np

from slime_core.config.schema import Config
from slime_core.types import Batch, StepReport

WATCHED = {"report": {"check_hooks": True}}


HOOK = "@slime_core.hookimpl\n{kind} {hook}({takes}):\n    {body}\n"


def hook(name, takes, body, kind="def"):
    return HOOK.format(kind=kind, hook=name, takes=takes, body=body)


def batch():
    return Batch(
        version=3,
        sample_ids=["main/3-0", "main/3-1"],
        tasks=["default"] * 2,
        group=np.array([3, 3]),
        rollout=np.array([6, 7]),
        reward=np.array([1.0, 0.0]),
        tokens=np.array([2, 12, 3, 2, 12, 4], np.int32),
        offsets=np.array([0, 3, 6]),
        loss_mask=np.ones(2, np.float32),
        response_offsets=np.array([0, 1, 2]),
        columns={"advantages": np.ones(2, np.float32)},
    )


def report():
    return StepReport(version=4, stage="main", step=3, of=9, metrics={"loss": 1.0, "bad": float("nan")}, seconds={})


def call_of(name, group):
    """The facade's method of a hook, and what it is called with."""
    return {
        "slime_sampling": ("sampling", group.prompt),
        "slime_generate": ("generate", group),
        "slime_sample_done": ("sample_done", group.samples[0]),
        "slime_reward": ("reward", group),
        "slime_filter": ("filter", group),
        "slime_batch": ("batch", batch()),
        "slime_step_done": ("step_done", report()),
    }[name]


def ask(plugins, name, group, ctx, **sections):
    method, argument = call_of(name, group)
    answer = getattr(plugins, method)(argument, replace(ctx, config=Config(**sections)))
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


TAKES = {
    "slime_sampling": "prompt, ctx",
    "slime_sample_done": "sample, ctx",
    "slime_batch": "batch, ctx",
    "slime_step_done": "report, ctx",
}
