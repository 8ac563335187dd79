"""Every example is complete: a recipe, a page whose commands hold, a test that trains it, a row in the tables."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slime_core.testing import tiny_model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/README.md"))
FOLDERS = sorted(path for path in ROOT.glob("examples/[!_]*/") if any(path.glob("*.*")))  # no __pycache__
ELSEWHERE = {
    "sglang": ["README.md", "cpu.toml", "gpu.toml"],  # one task for two machines: plugins/slime_sglang, tests/gpu
}
"""Examples whose tests are the suite's own."""
PAGES = (ROOT / "docs" / "examples.md",)
LACKING = (
    r"CFG04\s+the run needs \d+ GPUs and sees \d+",
    r"CFG04\s+cluster.device = cuda, and torch sees no GPU on this machine",
    r"CFG04\s+SGLang is not found",
    r"CFG05\s+the model [\w.-]+/[\w.-]+ is neither a folder nor in the hub's cache",
)
"""What a machine without GPUs, SGLang and a network says when all else about a command is right."""

OWN = {"input": "x", "question": "x", "prompt": [{"role": "user", "content": "x"}], "label": "x", "answer": "x"}
"""A row of a reader's own data set."""


def commands(page: Path) -> list[list[str]]:
    """The words of every `slime run` of a page's blocks, continued lines joined, comments left out."""
    blocks = "\n".join(re.findall(r"```(?:console|sh)\n(.*?)```", page.read_text(), flags=re.S))
    lines = [line.removeprefix("$ ").strip() for line in blocks.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("slime run")]


def test_folders_are_named_with_words_and_hold_what_an_example_has() -> None:
    missing = []
    for folder in FOLDERS:
        wanted = ELSEWHERE.get(folder.name, ["README.md", "recipe.toml", "test_*.py"])
        missing += [f"{folder.name}: {name}" for name in wanted if not list(folder.glob(name))]
    assert missing == []
    assert [folder.name for folder in FOLDERS if not re.fullmatch(r"[a-z]+(_[a-z]+)*", folder.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_have_every_example(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    linked = {name for row in rows for name in re.findall(r"\]\((?:\.\./)?examples/(\w+)/README\.md\)", row)}
    assert linked == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_every_run_of_a_page_is_one_that_starts(folder: Path, tmp_path: Path, forked_slime: Any) -> None:
    """As a dry run, where the pages' commands begin: at the repository's root, with earlier runs and a reader's files."""
    for name in ("examples", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    wrong = []
    for words in commands(folder / "README.md"):
        given = dict(pairwise(words))
        if "--resume" in given:
            continue
        for name in re.findall(r"(?<![\w./-])[\w-]+\.jsonl?\b", " ".join(words)):
            (tmp_path / name).write_text(json.dumps(OWN) if name.endswith("jsonl") else "{}")
        done = forked_slime(*words, "--dry-run", SLIME_BUFFER_TOKEN="any", HF_HUB_OFFLINE="1")
        if done.returncode and not any(re.search(rf"error {lack}", done.stderr) for lack in LACKING):
            wrong.append(f"slime {shlex.join(words)}\n{done.stderr}")
        if "--run-dir" in given:
            tiny_model(tmp_path / given["--run-dir"] / "final")
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_a_page_is_short_and_shows_a_run(folder: Path) -> None:
    page = folder / "README.md"
    assert len(page.read_text().splitlines()) <= 66
    assert commands(page), "the page shows no slime run"
