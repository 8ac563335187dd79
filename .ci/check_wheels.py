"""Build every wheel, install them where nothing of ours is, and train two steps from outside the repository.

    python .ci/check_wheels.py            # from an environment with the dev extra; prints one line a check
    python .ci/check_wheels.py dist       # also keeps sdists and wheels in dist/, for a release

The new environment is empty but for our wheels: third-party packages are linked from the environment that runs this
file, so that torch is not installed again. Distributions of ours, editable installs and .pth files are left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("slime", "_editable_impl_", "__editable__")
GROUP = 'entry-points."slime.plugins"'  # of a plugin; other packages are libraries alone
NEW_PLUGIN = "wheelcheck"
RECIPE = """\
name = "two-steps"
plugins = ["rm_math"]
[rollout]
hf_checkpoint = {model}
init_weights = "random"
num_rollout = 2
rollout_batch_size = 4
n_samples_per_prompt = 2
rollout_max_response_len = 4
[train]
dtype = "float32"
lr = 1e-3
"""


def main() -> int:
    """Run all checks in a temporary folder; the first failure ends with its output and exit code 1."""
    with tempfile.TemporaryDirectory(prefix="slime-wheels-") as name:
        folder = Path(name)
        python = empty_environment(folder / "env", third_party(folder / "shared"))
        projects = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
        wheels = [build(project, folder / "dist") for project in projects]
        check_descriptions(folder / "dist")
        install(python, wheels)
        slime = python.with_name("slime")
        run([slime, "--help"], folder)
        say("slime --help")
        plugins = [w for at, w in zip(projects, wheels, strict=True) if GROUP in (at / "pyproject.toml").read_text()]
        check_listed(slime, plugins, folder)
        check_home(python, wheels[1:], folder)
        run([slime, "run", "--plugin", "rm_math", "--dry-run"], folder)
        say("slime run --plugin rm_math --dry-run")
        run([slime, "models", "show", "qwen3-4b", "--flags"], folder)
        say("slime models show qwen3-4b --flags")
        run([slime, "kernelbench", "problems", "list"], folder)
        say("slime kernelbench problems list")
        check_sandbox(python, folder)
        check_two_steps(python, folder)
        check_new_plugin(python, folder)
        if len(sys.argv) > 1:
            keep(folder / "dist", Path(sys.argv[1]))
    say("all wheels install and train outside the repository")
    return 0


def third_party(folder: Path) -> Path:
    """A folder of links to everything in this environment's site-packages that is not ours."""
    folder.mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if not entry.name.startswith(OURS) and entry.suffix != ".pth" and entry.name != "__pycache__":
                (folder / entry.name).symlink_to(entry)
    return folder


def empty_environment(folder: Path, shared: Path) -> Path:
    """A new environment that sees ``shared`` behind its own packages; the answer is its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    (Path(site) / "shared.pth").write_text(f"{shared}\n")
    return python


def build(project: Path, dist: Path) -> Path:
    """Build a project's sdist, and its wheel from that sdist, so that neither misses a file."""
    target = dist / project.name
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", target, project], project)
    (wheel,) = target.glob("*.whl")
    say(f"built {wheel.name}")
    return wheel


def check_descriptions(dist: Path) -> None:
    """Metadata of every sdist and wheel is complete, and its long description renders."""
    files = sorted(path for path in dist.glob("*/*"))
    run([sys.executable, "-m", "twine", "check", "--strict", *files], dist)
    say(f"twine check --strict: {len(files)} files")


def keep(dist: Path, target: Path) -> None:
    """Copy sdists and wheels into one folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in dist.glob("*/*"):
        shutil.copy2(path, target)
    say(f"kept in {target}")


def install(python: Path, wheels: Sequence[Path]) -> None:
    """Install wheels with their requirements checked against what is linked, never fetched."""
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-index", *wheels], python.parent)


def check_listed(slime: Path, wheels: Sequence[Path], folder: Path) -> None:
    """`slime plugins list --json` names the distribution of every plugin wheel."""
    text = output([slime, "plugins", "list", "--json"], folder)
    json.loads(text)
    for wheel in wheels:
        distribution = wheel.name.split("-")[0].replace("_", "-")
        if f'"{distribution}"' not in text:
            fail(f"`slime plugins list --json` does not name {distribution}", text)
    say("slime plugins list --json")


def check_home(python: Path, plugins: Sequence[Path], folder: Path) -> None:
    """The packages that are imported come from the wheels."""
    modules = ", ".join(["slime_core", "slime_cli", *(wheel.name.split("-")[0] for wheel in plugins)])
    where = output([python, "-c", f"import {modules}; print(*(m.__file__ for m in ({modules})))"], folder)
    if any(not path.startswith(str(python.parents[1])) for path in where.split()):
        fail("a package of ours does not come from its wheel", where)
    say("packages come from their wheels")


def check_sandbox(python: Path, folder: Path) -> None:
    """The self-test of the sandbox, which runs below a fork server and jails of its own, holds."""
    rows = json.loads(output([python.with_name("slime"), "doctor", "--json", "--plugin", "sandbox"], folder))["checks"]
    (level,) = (row for row in rows if row["name"] == "sandbox: level")
    if not level["details"]:
        fail("no sandbox opens", json.dumps(level, indent=1))
    say(f"sandbox: {level['found']}")


def check_two_steps(python: Path, folder: Path) -> None:
    """Two GRPO steps of a model made from a seed leave metrics and a model folder."""
    where = "import slime_rm_math, os; print(os.path.dirname(slime_rm_math.__file__))"
    model = Path(output([python, "-c", where], folder).strip()) / "model"
    recipe = folder / "two_steps.toml"
    recipe.write_text(RECIPE.format(model=json.dumps(str(model))))
    train([python.with_name("slime"), "run", recipe], folder / "run", folder)
    say("two steps")


def check_new_plugin(python: Path, folder: Path) -> None:
    """What `slime plugins new` writes builds, installs, is listed and trains."""
    slime = python.with_name("slime")
    run([slime, "plugins", "new", NEW_PLUGIN], folder)
    (project,) = (path.parent for path in folder.glob("*/pyproject.toml"))
    wheel = build(project, folder / "dist-new")
    install(python, [wheel])
    check_listed(slime, [wheel], folder)
    train([slime, "run", "--plugin", NEW_PLUGIN, "--num-rollout", "2"], folder / "run-new", folder)
    say("a plugin from `slime plugins new` trains")


def train(command: Sequence[str | Path], run_dir: Path, cwd: Path) -> None:
    """Run a training command and look for what it must leave."""
    text = run([*command, "--run-dir", run_dir], cwd)
    for name in ("config.toml", "metrics.jsonl", "final/model.safetensors"):
        if not (run_dir / name).is_file():
            fail(f"the run left no {name}", text)


def output(command: Sequence[str | Path], cwd: Path) -> str:
    """What a command prints on stdout; any failure ends the program."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean_environ(), capture_output=True, text=True)
    if done.returncode:
        fail(f"exit code {done.returncode}: {' '.join(map(str, command))}", done.stdout + done.stderr)
    return done.stdout


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Like :func:`output`, with stderr behind stdout."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        fail(f"exit code {done.returncode}: {' '.join(map(str, command))}", done.stdout)
    return done.stdout


def clean_environ() -> dict[str, str]:
    """The environment without anything that leads Python back to the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def say(text: str) -> None:
    """One finished check."""
    print(f"ok  {text}", flush=True)


def fail(what: str, text: str) -> None:
    """End with what went wrong and the output it came with."""
    print(f"FAILED  {what}\n{text}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
