"""Has the suite teeth? Each safeguard is taken out of a copy of the source, and the test that is its witness must fail."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CRASHES = "tests/unit/checkpoint/test_crashes.py::test_every_crash"
WITNESSES = "tests/chaos/test_witnesses.py::test_a_run_killed_at_a_boundary_is_the_same"


@dataclass(frozen=True)
class Mutant:
    """One safeguard less: ``old`` becomes ``new`` in ``file``, and ``witness`` sees it."""

    name: str
    file: str
    old: str
    new: str
    witness: str


MUTANTS = [
    Mutant(
        "payloads are named before they are durable",
        "slime_core/ledger/segments.py",
        "            number = self._number\n            try:\n                durable.disk.sync(self._fd)\n",
        "            number = self._number\n            try:\n                pass\n",
        f"{CRASHES}_of_a_segment_keeps_what_was_synced",
    ),
    Mutant(
        "a checkpoint's files are not synced",
        "slime_core/durable.py",
        "        disk.sync(fd)\n    finally:",
        "        pass\n    finally:",
        f"{CRASHES}_of_a_publish_leaves_the_old_or_the_new_checkpoint",
    ),
    Mutant(
        "a checkpoint's folder is not synced",
        "slime_core/checkpoint/store.py",
        "            disk.sync_folder(folder)\n",
        "            pass\n",
        f"{CRASHES}_of_a_publish_leaves_the_old_or_the_new_checkpoint",
    ),
    Mutant(
        "the folder of checkpoints is not synced",
        "slime_core/checkpoint/store.py",
        '        failpoint("checkpoint.renamed")\n        disk.sync_folder(self.folder)\n',
        '        failpoint("checkpoint.renamed")\n',
        f"{CRASHES}_of_a_publish_leaves_the_old_or_the_new_checkpoint",
    ),
    Mutant(
        "a checkpoint is written in place",
        "slime_core/checkpoint/store.py",
        'self.folder / f"{manifest.ASIDE}{version}-{uuid.uuid4().hex[:12]}"',
        'self.folder / f"{manifest.PREFIX}{version}"',
        f"{CRASHES}_of_a_publish_leaves_the_old_or_the_new_checkpoint",
    ),
    Mutant(
        "the ledger does not say what has trained",
        "slime_core/ledger/ledger.py",
        "        await self.commits.run(lambda: self.rows.trained(version, fingerprint), points=TRAINED)\n",
        "        await self.commits.run(lambda: None, points=TRAINED)\n",
        f"{WITNESSES}[trained]",
    ),
    Mutant(
        "a step's composition is not journaled",
        "slime_core/ledger/ledger.py",
        "self.rows.journal(version, stage, ids)",
        "None",
        f"{WITNESSES}[trained]",
    ),
    Mutant(
        "what unfinished samples have is not kept",
        "slime_core/ledger/ledger.py",
        "self.rows.suspend(turns_now)",
        "None",
        f"{WITNESSES}[suspended]",
    ),
    Mutant(
        "a resumed run does not rewind its ledger",
        "slime_core/resume.py",
        "await self.components.ledger.rewind(checkpoint.version if checkpoint else 0)\n",
        "pass\n",
        f"{WITNESSES}[rewound]",
    ),
    Mutant(
        "plugins do not get their state back",
        "slime_core/resume.py",
        '            self.plugins.load_state(state["plugins"])\n',
        "",
        f"{WITNESSES}[trained]",
    ),
    Mutant(
        "what a killed process was writing stays",
        "slime_core/resume.py",
        "        self.checkpoints.sweep()",
        "        pass",
        f"{WITNESSES}[swept]",
    ),
    Mutant(
        "a version may be made again with other weights",
        "slime_core/ledger/rows.py",
        "        if row[1] and fingerprint and row[1] != fingerprint:\n",
        "        if False:\n",
        "tests/chaos/test_ledger_life.py::test_a_life_of_three_hundred_acts",
    ),
    Mutant(
        "children outlive their driver",
        "slime_core/parent.py",
        "    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n",
        "",
        "tests/chaos/test_witnesses.py::test_a_child_that_stands_still_dies_with_its_driver",
    ),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The source and the tests, where they can be broken."""
    folder = tmp_path_factory.mktemp("mutants")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("slime_core", "cli", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def outcome(folder, witness):
    """The exit status and output of one test of a copy."""
    path = os.pathsep.join([str(folder), str(folder / "cli"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", witness],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.unit
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_safeguard_is_where_the_mutant_takes_it_from(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("witness", sorted({mutant.witness for mutant in MUTANTS}))
def test_the_witness_passes_while_nothing_is_taken_away(copy, witness):
    code, output = outcome(copy, witness)
    assert code == 0, output


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_run_without_a_safeguard_is_caught(copy, mutant):
    path = copy / mutant.file
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    try:
        code, output = outcome(copy, mutant.witness)
    finally:
        path.write_text(sound)
    assert code == 1, f"nobody noticed that {mutant.name}:\n{output}"
    assert "failed" in output
