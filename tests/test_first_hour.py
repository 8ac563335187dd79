"""What a newcomer reads first holds: quick start and plugin guide typed command by command, names of other libraries."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slime_cli.config import core_rows

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"
STOPPED = 75
SHORT = {"20s": "3s"}  # for the witness: long enough for a checkpoint of the warm-up


def commands(page):
    """Commands and files of a page, in order: a block that follows "Save ... as `NAME`" is that file."""
    text = page.read_text()
    for match in re.finditer(r"(?:as\s+`([\w.]+)`[^`]*)?^```(\w+)\n(.*?)^```", text, flags=re.M | re.S):
        name, kind, block = match.groups()
        if kind == "console":
            for line in block.replace("\\\n", " ").splitlines():
                yield "", shlex.split(line.removeprefix("$ "), comments=True)
        elif name:
            yield name, block


def test_the_quick_start_runs_as_it_is_written(tmp_path, forked_slime):
    (tmp_path / "plugins").symlink_to(ROOT / "plugins")
    site = tmp_path / "site"
    done = []
    for name, what in commands(PAGE):
        if name:
            (tmp_path / name).write_text(what)
        elif what == ["slime", "doctor"]:
            continue  # tests/cli/test_doctor.py
        elif what[0] == "slime":
            words = [SHORT.get(word, word) for word in what[1:]]
            process = forked_slime(*words, path=[site] if site.exists() else [])
            expected = STOPPED if "--stop-after" in words else 0
            assert process.returncode == expected, f"{' '.join(what)}\n{process.stdout}{process.stderr}"
            done.append(" ".join(what[:3]))
        elif what[0] == "cp":
            shutil.copytree(tmp_path / what[2], tmp_path / what[3])
        elif what[:3] == ["pip", "install", "-e"] and what[3].startswith("slime-"):
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--no-build-isolation",
            ]
            subprocess.run([*pip, "--target", site, tmp_path / what[3]], check=True, capture_output=True)
        else:
            assert what[0] in ("python", ".", "pip"), f"the page types {what}"
    assert len(done) > 12
    assert (tmp_path / "runs/mine-0/final/model.safetensors").is_file()
    assert (tmp_path / "runs/short-0/final/model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_quick_start_and_plugin_guide_run_in_an_empty_environment(tmp_path):
    clone = tmp_path / "slime"
    skipped = shutil.ignore_patterns(".venv*", ".git", "build", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, clone, ignore=skipped, symlinks=True)
    lines = ["set -eu", 'stopped() { code=0; "$@" || code=$?; [ $code -eq 75 ]; }']
    for name, what in [*commands(PAGE), *commands(ROOT / "docs" / "plugins.md")]:
        if name:
            lines += [f"cat > {name} <<'END_OF_FILE'", what.rstrip("\n"), "END_OF_FILE"]
        else:
            lines += [("stopped " if "--stop-after" in what else "") + shlex.join(what)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    script = "\n".join([*lines, "echo complete"])
    done = subprocess.run(["bash", "-c", script], cwd=clone, env=environ, capture_output=True, text=True)
    assert done.stdout.endswith("complete\n"), done.stdout[-4000:] + done.stderr[-4000:]


def names(section):
    """Rows of a table of docs/coming_from.md: the names of the other library, and slime's."""
    text = (ROOT / "docs" / "coming_from.md").read_text()
    part = text[text.index(f"## {section}") :].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in part.splitlines() if line.startswith("| `")]
    return [[re.findall(r"`([\w.]+)`", cell) for cell in row] for row in rows]


@pytest.mark.parametrize("section", ["verl", "TRL"])
def test_every_name_beside_another_librarys_is_a_key_of_slime(section):
    keys = {row["key"].rpartition(".")[2] for row in core_rows()}
    rows = names(section)
    assert len(rows) > 25
    assert {name for _, own in rows for name in own} - keys == set()
    assert all(other and own for other, own in rows)


def test_every_name_of_trl_is_a_field_of_its_config():
    fields = set()
    for package, files in {
        "trl": ["trainer/grpo_config.py", "trainer/model_config.py"],
        "transformers": ["training_args.py"],
    }.items():
        for file in files:
            tree = ast.parse((Path(find_spec(package).origin).parent / file).read_text())
            fields |= {
                node.target.id
                for node in ast.walk(tree)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    assert {name for other, _ in names("TRL") for name in other} - fields == set()
