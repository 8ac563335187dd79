"""Templates of deploy/, the image and the release workflow: linted, and the Slurm job run with stand-ins of Slurm."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slime_core.config.load import split

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
MANIFESTS = sorted(ROOT.glob("deploy/kubernetes/*.yaml"))
SBATCH = ROOT / "deploy/slurm/slime.sbatch"
STAND_INS = {
    "scontrol": 'case $1 in show) printf "n1\\nn2\\n" ;; *) echo "$@" >> "$LOG" ;; esac',
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "python": "echo 2",
    "ray": 'echo "ray $*" >> "$LOG"',
}
SLIME = """#!{python}
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(os.environ["LOG"], "a") as log:
    print("slime", *sys.argv[1:], file=log)
with open(os.environ["FIFO"], "w") as fifo:
    print("started", file=fifo)
signal.sigwait([signal.SIGTERM])
sys.exit(int(os.environ["END"]))
"""


def tool(name):
    """A linter that pip has installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


@pytest.mark.parametrize(
    "words",
    [
        ["shellcheck", "deploy/slurm/slime.sbatch"],
        ["hadolint", "docker/Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/release.yml"],
        [
            "check-jsonschema",
            "--builtin-schema",
            "custom.github-workflows-require-timeout",
            ".github/workflows/release.yml",
        ],
    ],
    ids=lambda words: " ".join(words[:1] + words[2:3]),
)
def test_a_linter_finds_nothing(words):
    done = subprocess.run([tool(words[0]), *words[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_kubernetes_takes_every_object(version):
    objects = [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text())]
    assert {item["kind"] for item in objects} == {"Job", "PersistentVolumeClaim", "Service", "StatefulSet"}
    for item in objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_pods_run_commands_that_slime_has_and_end_after_their_checkpoint():
    jobs = [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text()) if item["kind"] == "Job"]
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        command, *words = pod["containers"][0]["args"]
        assert command == "run"
        assert words[words.index("--resume") + 1] == "auto"
        own = [words.index("--run-dir"), words.index("--resume")]
        keys = [word for n, word in enumerate(words) if n not in own and n - 1 not in own]
        assert split(keys).recipe == "/data/recipe.toml"
        assert pod["restartPolicy"] == "OnFailure"
        assert pod["terminationGracePeriodSeconds"] >= 600


def test_the_image_installs_released_packages_and_no_patch():
    text = (ROOT / "docker/Dockerfile").read_text()
    assert "[fsdp,megatron,ray,sglang,serve,wandb]" in text
    assert not {"git", "patch", "git+"} & set(text.replace('"', " ").split())
    assert "USER 10001" in text


@pytest.mark.parametrize("code", [75, 0], ids=["preempted", "done at the signal"])
def test_a_slurm_job_starts_a_cluster_and_is_queued_again_when_it_was_stopped_with_a_checkpoint(code, tmp_path):
    scripts = {name: f"#!/bin/bash\n{script}\n" for name, script in STAND_INS.items()}
    for name, script in {**scripts, "slime": SLIME.format(python=sys.executable)}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    os.mkfifo(fifo)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    paths = {"SLIME_BIN": str(tmp_path), "LOG": str(log), "FIFO": str(fifo), "RUN_DIR": str(tmp_path / "run")}
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HEAD_SECONDS": "0",
        "END": str(code),
        **job,
        **paths,
    }
    process = subprocess.Popen(
        [shutil.which("bash"), SBATCH, "recipe.toml", "--lr", "1e-6"], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert fifo.read_text() == "started\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    lines = log.read_text().splitlines()
    assert process.returncode == code
    assert "2 of 2 nodes have joined the Ray cluster at 10.0.0.1:6379" in output
    head, worker = (next(line for line in lines if part in line) for part in ("--head", "--address=10.0.0.1:6379"))
    assert all(line.startswith("ray start --block") and "--num-gpus=8" in line for line in (head, worker))
    (run,) = [line for line in lines if line.startswith("slime ")]
    assert run.startswith("slime run recipe.toml --lr 1e-6 --cluster ray --ray-address 10.0.0.1:6379 --run-dir ")
    assert run.endswith("--resume auto")
    assert ("requeue 7" in lines) is (code == 75)
