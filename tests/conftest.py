"""Fixtures for every room: the command line as a process, plugins installed into a folder, small model folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def slime(tmp_path):
    """Run `slime ARGS` as a user does, in a folder of its own; the answer has returncode, stdout and stderr."""

    def run(*args, cwd=tmp_path, path=(), timeout=120, **env):
        search = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        return subprocess.run(
            [sys.executable, "-m", "slime_cli.main", *map(str, args)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def install_plugin(tmp_path, monkeypatch):
    """Write a plugin and its distribution's metadata, as pip would, and put them on the path; answers the folder."""
    site = tmp_path / "site"

    def install(name, source, *, distribution="", version="1.0"):
        distribution = distribution or f"dist-{name}"
        module = f"{name}_plugin_module"
        site.mkdir(exist_ok=True)
        (site / f"{module}.py").write_text(source)
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[slime.plugins]\n{name} = {module}\n")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        return site

    yield install
    for module in [m for m in sys.modules if m.endswith("_plugin_module")]:
        del sys.modules[module]
