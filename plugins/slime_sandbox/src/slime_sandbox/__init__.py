"""Runs untrusted code for any plugin, in processes that can reach nothing else and always end.

    async with await Sandbox.open(Policy(), preload=("torch", "my_plugin.runner")) as box:
        outcome = await box.run("my_plugin.runner:main", payload, Limits(wall_seconds=10))

The process that runs a candidate never produces the verdict on it: what it answers is opaque, judged elsewhere.
"""

from __future__ import annotations

from slime_sandbox.box import Sandbox as Sandbox
from slime_sandbox.child import CandidateEnded as CandidateEnded, CandidateProcess as CandidateProcess
from slime_sandbox.inside import CandidateChannel as CandidateChannel
from slime_sandbox.selftest import compute_on as compute_on
from slime_sandbox.types import Level as Level, Limits as Limits, Outcome as Outcome, Policy as Policy

__all__ = [
    "CandidateChannel",
    "CandidateEnded",
    "CandidateProcess",
    "Level",
    "Limits",
    "Outcome",
    "Policy",
    "Sandbox",
    "compute_on",
]
