"""Clusters for the contract's checks: their processes bear a mark in their environment."""

import os
from pathlib import Path

from slime_core.clusters import build_cluster
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import load_config
from slime_core.plugins import load_plugins
from slime_core.report import Report
from slime_core.report.rundir import RunDir
from slime_core.testing import tiny_model
from slime_core.testing.contracts import ClusterCase

MARK = "SLIME_CLUSTER_CASE"


def processes(mark):
    """Ranks and engines with this mark that are alive, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"slime_core.clusters." in line and f"{MARK}={mark}".encode() in environ:
            found.append(int(entry.name))
    return found


async def keeps(check, folder, *flags, alive=None):
    """Run a check on the cluster that the flags choose; ``alive`` finds its processes where they bear another mark."""
    os.environ[MARK] = str(folder)
    words = ["--hf-checkpoint", str(tiny_model(folder / "model", hidden=32)), "--device", "cpu", "--cpu-threads", "1"]
    config = resolve_machine(load_config(None, [*words, *flags]))
    plugins = load_plugins(config)
    with RunDir.create("run", at=folder / "run") as run_dir:
        (run_dir.path / "config.toml").touch()
        report = Report(run_dir, config)
        start = lambda: build_cluster(config, plugins, report)  # noqa: E731
        await check(ClusterCase(start=start, stage=config, alive=alive or (lambda: processes(folder))))
