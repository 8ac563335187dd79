"""Rows of `slime doctor` about backends: what each still needs on this machine, and the command that installs it."""

from __future__ import annotations

import re
from functools import partial
from importlib import metadata, util

from slime_core.errors import DISTRIBUTION, install_line, needs
from slime_core.plugins.backends import BROUGHT_BY, install
from slime_core.protocols import Check, CheckResult

CHOSEN_BY = {
    "fsdp": "the embedded engine and the FSDP2 trainer",
    "sglang": "--rollout-engine sglang",
    "megatron": "--train-backend megatron",
    "ray": "--cluster ray",
}
"""What each backend is used by."""


def backend_checks() -> list[Check]:
    """A row for the embedded backends, and one for each of slime's own packages."""
    return [Check(name=f"backend {name}", run=partial(backend, name)) for name in CHOSEN_BY]


def backend(name: str) -> CheckResult:
    """What of a backend is installed; only the embedded ones are needed by every run."""
    absent = [package for package in packages(name) if not is_installed(package)]
    if absent:
        distribution = BROUGHT_BY.get(name)
        fix = install(name) if distribution in absent else install_line(name)
        text = f"missing: {', '.join(absent)}; {CHOSEN_BY[name]} needs it"
        if name == "fsdp":
            return CheckResult(status="fail", found=text, fix=fix)
        return CheckResult(status="ok", found=f"{text}: {fix}")
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages(name))
    gpus = f"; {CHOSEN_BY[name]} trains on GPUs, and torch sees none" if name == "megatron" and not has_gpu() else ""
    return CheckResult(status="ok", found=f"{versions}{gpus}")


def packages(name: str) -> list[str]:
    """Distributions that a backend needs: those of its extra, and of slime's own package behind it."""
    distribution = BROUGHT_BY.get(name)
    rows = needs(DISTRIBUTION).get('extra == "fsdp"', [])
    if distribution:
        rows = [distribution, *needs(distribution).get("", [])]
    names = [re.split(r"[^\w.-]", row)[0] for row in rows]
    prefixes = ("slime-", "editables")  # the second is of editable installs
    return [package for package in dict.fromkeys(names) if package == distribution or not package.startswith(prefixes)]


def is_installed(name: str) -> bool:
    """Whether a distribution is installed; nothing is imported."""
    try:
        return metadata.distribution(name) is not None
    except metadata.PackageNotFoundError:
        return False


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    if util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
