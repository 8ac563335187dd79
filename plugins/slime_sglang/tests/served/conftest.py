"""A real SGLang server on this CPU. One serves every test that leaves it alive; others start their own.

The model is rm_math's shape with random weights of a seed (99 tokens, tied embeddings), its context widened, so that
requests run long enough to be interrupted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raw_server import FORKING, Loop, RawServer, start, words

from slime_sglang.host import Launch
from slime_sglang.ports import server_launch

RM_MATH = Path(__file__).parents[3] / "slime_rm_math" / "src" / "slime_rm_math" / "model"
CONTEXT = 4096
StartServer = Callable[..., RawServer]


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights; no test changes it."""
    return make_model(tmp_path_factory.mktemp("served") / "model", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return make_model(tmp_path_factory.mktemp("other") / "model", seed=1)


def make_model(folder: Path, seed: int) -> Path:
    """rm_math's model with a longer context, and weights."""
    from slime_core.weights.folder import ModelFolder

    shutil.copytree(RM_MATH, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    ModelFolder.open(folder, init_weights="random").build_model(seed=seed).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    """Where servers and engines of these tests live."""
    with Loop() as running:
        yield running


@pytest.fixture(scope="session")
def launch(sglang_python: str, served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launch]:
    """How a server is started, with more words for its command line."""

    def of(*more: str, model: Path = served_model) -> Launch:
        log = tmp_path_factory.mktemp("server") / "log.txt"
        return server_launch(
            python=sglang_python,
            arguments=words(model, *more),
            env=FORKING,
            log=log,
        )

    return of


@pytest.fixture(scope="session")
def start_server(loop: Loop, launch: Callable[..., Launch], served_model: Path) -> Iterator[StartServer]:
    """Start a server of one's own, with more words for its command line; it is stopped at the end at the latest."""
    started: list[RawServer] = []

    def one_more(*more: str, model: Path = served_model) -> RawServer:
        started.append(start(loop, launch(*more, model=model), model))
        return started[-1]

    yield one_more
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(start_server: StartServer) -> RawServer:
    """The server that all tests share; take ``server``. `test_kill_and_recover.py` has it last, and kills it."""
    return start_server()


@pytest.fixture
def server(shared_server: RawServer) -> Iterator[RawServer]:
    """The shared server; afterwards nothing is paused there and nothing runs."""
    yield shared_server
    shared_server.settle()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that kill the shared server are the last that have it."""
    items.sort(key=lambda item: item.path.name == "test_kill_and_recover.py")
