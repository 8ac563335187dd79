"""Fixtures of more than one module."""

import asyncio
import os

import pytest

from slime_kernelbench.judge import LocalJudge


@pytest.fixture(scope="session")
def with_judge():
    """The value of ``work(judge)``; the tests share the judge, whose fork servers take seconds to start."""
    with asyncio.Runner() as runner:
        judge = LocalJudge()
        yield lambda work: runner.run(work(judge))
        runner.run(judge.aclose())


@pytest.fixture
def folder(tmp_path):
    """Where stand-in workers wait and tell, by two pipes."""
    for pipe in ("begun", "go"):
        os.mkfifo(tmp_path / pipe)
    return tmp_path
