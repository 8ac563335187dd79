"""The engine in its own process: an Engine like any other, until it dies; then an error for everyone at once."""

import asyncio
import dataclasses
import gc
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from forked_channel import start_forked

from slime_core.clusters.embedded import embedded_engine
from slime_core.clusters.engine_process import EngineProcess
from slime_core.clusters.machine import resolve_machine
from slime_core.clusters.proxy import Proxy
from slime_core.config.load import load_config
from slime_core.errors import DataError, EngineError
from slime_core.testing import tiny_model
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.integration

DEADLINE = 150.0  # seconds after which something that should end counts as hanging


def _config(folder, *flags):
    given = ("--hf-checkpoint", str(folder), "--dtype", "float32", "--device", "cpu", "--cpu-threads", "1")
    return resolve_machine(
        load_config(None, [*given, "--rollout-slots", "4", "--rollout-max-context-len", "300", *flags])
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.open(tiny_model(tmp_path_factory.mktemp("model") / "m", tied=True))


@pytest.fixture(scope="module")
def weights(folder):
    model = folder.build_model("float32")

    def update(version):
        return WeightUpdate(version=version, epoch=7, transport="shared", tensors=dict(model.state_dict()))

    return update


@pytest.fixture(scope="module")
def thread():
    made = TorchThread(1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, DEADLINE))


@pytest.fixture(scope="module")
def engine(folder, thread, loop, tmp_path_factory):
    """One process for all tests; the last one kills it."""
    made = EngineProcess(_config(folder.path), run_dir=tmp_path_factory.mktemp("run"), epoch=7, thread=thread)
    loop(made.__aenter__())
    yield made
    loop(made.__aexit__())


def _request(name, tokens=24, **changes):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    request = GenerateRequest(id=name, tokens=[5, 6, 7], params=params, seed=sum(name.encode()) << 40)
    return dataclasses.replace(request, **changes)


def test_an_engine_in_a_process_keeps_the_engine_contract(engine, loop, weights):
    """The checks run one after another on one process, the one before any load first."""
    assert ENGINE_CHECKS[0].__name__ == "engine_refuses_to_generate_before_its_first_load"
    for check in ENGINE_CHECKS:
        loop(check(EngineCase(engine=engine, update=weights, prompt=[3, 4, 5])))


def test_its_completions_have_the_bits_of_an_engine_in_this_process(engine, loop, weights, folder, thread):
    async def both():
        requests = [_request(name) for name in "abcdefg"]
        update = weights(11)
        await engine.load(update)
        assert update.fingerprints == await engine.fingerprints() != {}
        remote = await asyncio.gather(*(engine.generate(request) for request in requests))
        async with embedded_engine(_config(folder.path), folder, thread, epoch=7) as here:
            await here.load(weights(11))
            mine = await asyncio.gather(*(here.generate(request) for request in requests))
            assert here.abilities == engine.abilities
            assert list(await here.score([5, 6, 7, 8], 1)) == list(await engine.score([5, 6, 7, 8], 1))
        assert remote == mine
        assert {(done.epoch, *set(done.versions)) for done in remote} == {(7, 11)}

    loop(both())


def test_a_request_that_runs_while_weights_are_loaded_goes_on_and_each_token_says_its_version(engine, loop, weights):
    async def overtaken():
        await engine.load(weights(1))
        waiting = asyncio.create_task(engine.generate(_request("long", 240)))
        await engine.generate(_request("short", 2))  # it is being decoded by now
        await engine.load(weights(2))
        return await waiting

    done = loop(overtaken())
    assert set(done.versions) == {1, 2}
    assert done.versions == sorted(done.versions)


def test_an_abort_gives_partial_tokens_and_a_cancelled_caller_frees_its_slot(engine, loop, weights):
    async def ended():
        await engine.load(weights(1))
        tasks = [asyncio.create_task(engine.generate(_request(name, 250))) for name in "abcd"]  # all four slots
        await asyncio.sleep(0)
        for task in tasks[:3]:
            task.cancel()
        short = await engine.generate(_request("e", 2))
        assert len(short.tokens) == 2
        parts = await engine.abort(["d", "unknown"])
        assert await tasks[3] == parts[0]
        assert parts[0].finish == "abort"
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.cancelled() for task in tasks] == [True, True, True, False]

    loop(ended())


def test_errors_of_a_request_are_what_they_would_be_here(engine, loop, weights):
    loop(engine.load(weights(1)))
    with pytest.raises(EngineError) as caught:
        loop(engine.generate(dataclasses.replace(_request("a"), tokens=[])))
    assert (caught.value.code, caught.value.where) == ("ENG01", "request a")
    with pytest.raises(EngineError, match="ENG86"):
        loop(engine.load(WeightUpdate(version=9, epoch=7, transport="tensors", tensors={})))
    loop(engine.load(weights(2)))
    assert loop(engine.generate(_request("b", 2))).versions == [2, 2]


def test_signals_that_go_to_everyone_are_left_to_the_driver(engine, loop, weights):
    loop(engine.load(weights(1)))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    assert len(loop(engine.generate(_request("a", 3))).tokens) == 3


def test_a_killed_process_is_an_error_for_every_call_that_waits_and_for_every_later_one(engine, loop, weights):
    """Nothing hangs, and the message says how it ended. The last test that has the process."""

    async def killed():
        await engine.load(weights(1))
        waiting = [asyncio.create_task(engine.generate(_request(f"r{i}", 250))) for i in range(9)]
        await engine.generate(_request("first", 1))
        os.kill(engine.pid, signal.SIGKILL)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        for call in (engine.resume(), engine.load(weights(2)), engine.abort(["a"]), engine.fingerprints()):
            with pytest.raises(EngineError) as later:
                await call
            assert later.value.code == "ENG84"
        return ended

    ended = loop(killed())
    assert {type(error) for error in ended} == {EngineError}
    assert {error.what for error in ended} == {f"the engine's process {engine.pid} was killed by SIGKILL"}
    assert {(error.code, error.where) for error in ended} == {("ENG84", str(engine.log))}
    with pytest.raises(EngineError, match="ENG84"):
        loop(engine.resume())


class Full:
    """A channel that takes nothing any more, to a process that dies when ``gone`` is set."""

    pid, log = 1, "engine.log"

    def __init__(self):
        self.gone = asyncio.Event()

    async def write(self, frame):
        await asyncio.Event().wait()

    async def read(self):
        await self.gone.wait()
        raise ConnectionResetError

    async def ended(self, seconds):
        return "was killed"

    async def tail(self):
        return ""


def test_calls_that_are_cancelled_while_they_are_sent_leave_no_words_when_the_process_dies(loop):
    """The first error of a group cancels the others: whoever still writes has been told of it and never looks."""

    async def lost():
        said, channel = [], Full()
        proxy = Proxy(channel, "the engine", EngineError, "ENG84")
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        calls = [asyncio.create_task(proxy.call("generate", _request(f"c{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        channel.gone.set()
        while proxy.lost is None:
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        kinds = {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)}
        calls.clear()  # tracebacks, which hold what nobody looked at
        del call
        gc.collect()
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_exception_handler(None)
        return kinds, said

    assert loop(lost()) == ({asyncio.CancelledError}, [])


def test_a_model_that_cannot_be_opened_is_the_same_error_as_here(thread, loop, tmp_path):
    process = EngineProcess(_config(tmp_path), run_dir=tmp_path, epoch=7, thread=thread, start=start_forked)

    async def start():
        async with process:
            raise AssertionError("it started")

    with pytest.raises(DataError) as caught:
        loop(start())
    assert caught.value.code.startswith("TOK")


DRIVER = """
import asyncio, os, signal, sys
from pathlib import Path
from slime_core.clusters.machine import resolve_machine
from slime_core.clusters.engine_process import EngineProcess
from slime_core.config.load import load_config
from slime_core.threads import TorchThread

here = Path(sys.argv[2])
(here / "times").open("a").write("run\\n")  # this script has no guard: a child must not run it again


async def main():
    config = resolve_machine(load_config(None, ["--hf-checkpoint", sys.argv[1], "--device", "cpu", "--cpu-threads", "1"]))
    async with EngineProcess(config, run_dir=here, epoch=1, thread=TorchThread(1)) as engine:
        (here / "child").write_text(str(engine.pid))
        os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
"""


def test_when_the_driver_is_gone_so_is_the_process_and_a_script_without_a_guard_runs_once(folder, tmp_path, zygote):
    """The kernel ends the child; children are started anew, the script is not imported in them."""
    script, log = tmp_path / "script.py", tmp_path / "log.txt"
    script.write_text(DRIVER)
    ended = zygote.ask(scripts=[[str(script), str(folder.path), str(tmp_path)]], log=str(log), hung=DEADLINE)
    assert (ended["left"], "codes [-9]" in log.read_text()) == ([], True)
    with suppress(ProcessLookupError):
        child = os.pidfd_open(int((tmp_path / "child").read_text()))
        gone, _, _ = select.select([child], [], [], DEADLINE)
        os.close(child)
        assert gone, "the engine's process outlived its driver"
    assert (tmp_path / "times").read_text() == "run\n"


HANDLES = "torch.multiprocessing.reductions"  # names a tensor's memory for another process, and starts none


def test_nothing_forks_a_process_with_threads():
    """Children of a run are started anew. What does fork is a test's own tool."""
    root = Path(__file__).parents[3] / "slime_core"
    forks = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "testing" not in path.parts
        and ("os.fork" in (text := path.read_text()) or "multiprocessing" in text.replace(HANDLES, ""))
    ]
    assert forks == []
