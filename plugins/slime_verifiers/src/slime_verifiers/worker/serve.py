"""Serves environments of verifiers to a run. Run by the interpreter that has verifiers; needs nothing of slime.

    slime --requests, a JSON line each (stdin)--> worker --replies, in any order (stdout)--> slime
                                                    |-- supervisor: ends all that the worker has started

    python serve.py MEMORY_BYTES

A request has ``id`` and ``do``; its reply has the ``id``, and what was asked for or an ``error``. What an environment
prints goes to stderr. The worker's own Python process is a child of a supervisor, which adopts whatever it leaves
behind: when stdin closes or the worker dies, every process that an environment has started ends with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from importlib import metadata
from itertools import islice
from typing import Any

FRAMES = 3  # of a traceback that are shown, the innermost
GRACE = 5.0  # seconds to end in order
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SESSION = "X-Session-ID"  # header of a model call: the trace that it belongs to
ROLE = "x-slime-role"  # header that names a dialogue to slime: here the trace too
IDLE = 2.0  # seconds that a connection to slime may wait for its next call; slime closes one after 5
KEY = "SLIME_API_KEY"  # variable of the relay's key; subprocesses of an environment get none with API_KEY in its name
STOPPED = "the episode was stopped"
HARNESS = "slime_chat_loop"

Reply = dict[str, Any]


# -- the supervisor


def supervise(child: int) -> int:
    """Wait for the worker's end, that of whoever holds stdin, or SIGTERM; end every process below this one."""

    def end(*signal_and_frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, 0)  # POLLHUP alone: the worker reads it
    if ended not in dict(poll.poll()):
        poll.unregister(0)
        if not poll.poll(GRACE * 1000):
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ChildProcessError):
        while True:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)  # what it leaves behind becomes a child of this process
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def children() -> list[int]:
    """Processes below this one."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            pids += [int(name)] * (int(parent) == os.getpid())
    return pids


# -- the relay


class Relay:
    """Passes model calls of each trace to the session of its own episode.

    An environment holds one HTTP client for each address that it is given. So all episodes are given the address of
    this relay, which knows by a call's trace where it belongs.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, tuple[str, str]] = {}  # of a trace: address and key
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> None:
        """Listen on a loopback port."""
        import aiohttp
        from aiohttp import web

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)
        self._client = await stack.enter_async_context(session)
        self._secret = os.environ[KEY] = os.urandom(16).hex()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)  # a call given up ends at slime too
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _pass_on(self, request: Any) -> Any:
        from aiohttp import web

        trace = request.headers.get(SESSION, "")
        session = self.sessions.get(trace)
        if session is None or request.headers.get("authorization") != f"Bearer {self._secret}":
            return web.json_response(
                {"error": {"message": "no episode of this run", "code": "no_session"}}, status=401
            )
        base_url, key = session
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", ROLE: trace}
        async with self._client.post(
            f"{base_url}/{request.match_info['path']}", data=await request.read(), headers=headers
        ) as response:
            body = await response.read()
            return web.Response(body=body, status=response.status, headers={"content-type": response.content_type})


# -- environments


class Served:
    """An environment, its tasks as far as they were read, and its episodes."""

    def __init__(self, config: dict[str, Any], relay: Relay) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext, load_environment, resolve_env_config

        self._relay = relay
        select = config.pop("select", None)
        self._env = load_environment(resolve_env_config(with_defaults(config)))
        self._taskset = self._env.taskset
        if select:
            from verifiers.v1 import SelectConfig

            self._taskset = self._taskset.select(SelectConfig.model_validate(select))
        task_type = type(self._env.taskset).task_type()
        self._task_type, self._data_type = task_type, task_type.data_type()
        self._rows: list[dict[str, Any]] = []
        self._unread = iter(self._taskset)
        self._context = ModelContext(
            model="policy", client=EvalClientConfig(base_url=self._relay.url, api_key_var=KEY)
        )

    async def open(self, stack: AsyncExitStack) -> None:
        """Start what all episodes share."""
        await stack.enter_async_context(self._env.serving())

    def count(self) -> int | None:
        """Tasks, None where they do not end."""
        if not self._taskset.bounded:
            return None
        self._read(None)
        return len(self._rows)

    def task(self, position: int) -> dict[str, Any]:
        """The data of a task; IndexError behind the last."""
        self._read(position + 1 - len(self._rows))
        return self._rows[position]

    def _read(self, more: int | None) -> None:
        if more is None or more > 0:
            self._rows += [task.data.model_dump(mode="json") for task in islice(self._unread, more)]

    async def episode(self, data: dict[str, Any], base_url: str, api_key: str) -> Reply:
        """Play a task once: rewards and metrics of every agent's trace."""
        task = self._task_type(self._data_type.model_validate(data), self._env.config.taskset.task)
        (slot,) = self._env.slots(task)
        names: list[str] = []

        def on_trace(trace: Any) -> None:
            names.append(trace.id)
            self._relay.sessions[trace.id] = base_url, api_key

        try:
            episode = await self._env.run_slot(slot, self._context, on_trace=on_trace)
        finally:
            for name in names:
                del self._relay.sessions[name]
        return {
            "complete": bool(self._env.complete(episode)),
            "errors": [
                error_line(error) for error in (*episode.errors, *(e for t in episode.traces for e in t.errors))
            ],
            "traces": [summary(trace) for trace in episode.traces],
        }


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The ``[env]`` block in which agents without a harness or a runtime of their own run in this process.

    verifiers' own defaults are a harness that lets the model run commands, and a rented remote sandbox.
    """
    from verifiers.v1 import AgentConfig, default_harness_id, env_config_type

    taskset = config["taskset"]["id"]
    for name, field in env_config_type(taskset, config.get("id", "")).model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        role = config[name] = dict(config.get(name) or {})
        pinned = field.default.model_fields_set
        if "harness" not in pinned and default_harness_id(taskset) == "bash":
            role.setdefault("harness", {"id": HARNESS})
        if "runtime" not in pinned:
            role.setdefault("runtime", {"type": "subprocess"})
    return config


def error_line(error: Any) -> str:
    """An error of verifiers as a line."""
    return f"{error.type}: {error.message}"


def summary(trace: Any) -> Reply:
    """What a run needs of a trace."""
    return {
        "id": trace.id,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "weights": {name: reward.weight for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "stop": trace.stop_condition,
        "truncated": trace.is_truncated or trace.is_timeout,
        "turns": trace.num_turns,
    }


def known_environments() -> list[str]:
    """Names of installed packages that need verifiers, and of the tasksets that it ships."""
    import pkgutil

    from verifiers.v1 import tasksets

    names = {module.name for module in pkgutil.iter_modules(tasksets.__path__)}
    for distribution in metadata.distributions():
        if any(one.replace("_", "-").split(";")[0].startswith("verifiers") for one in distribution.requires or ()):
            names.add(distribution.metadata["Name"])
    return sorted(names)


# -- the worker


class RequestServer:
    """Reads requests and answers each when it is done."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._served: dict[str, asyncio.Future[Served]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rows = ThreadPoolExecutor(1)  # reads tasks, one request after the other
        self._sending = threading.Lock()
        self._relay = Relay()

    async def run(self) -> None:
        """Until stdin closes."""
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with os.fdopen(self._requests, "rb") as lines:
                for request in map(json.loads, lines):
                    served = self._loaded(request["env"]) if request["do"] == "task" else None
                    if served is not None:  # an episode may hold the loop, and slime waits for a task
                        self._rows.submit(self._answer_task, served, request)
                    else:
                        loop.call_soon_threadsafe(self._begin, request)
            loop.call_soon_threadsafe(closed.set)

        async with AsyncExitStack() as self._stack:
            await self._relay.start(self._stack)
            threading.Thread(target=read, daemon=True).start()
            await closed.wait()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _begin(self, request: dict[str, Any]) -> None:
        number = request["id"]
        if request["do"] == "cancel":
            if number in self._running:
                self._running[number].cancel(STOPPED)
            return
        self._running[number] = asyncio.ensure_future(self._answer(number, request))

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        try:
            reply = await self._do(request)
        except asyncio.CancelledError as error:
            if error.args != (STOPPED,):
                raise  # this process ends: an environment has called sys.exit, or slime has closed stdin
            reply = {"error": STOPPED}
        except (Exception, SystemExit) as error:
            reply = failure(error, request)
        finally:
            self._running.pop(number, None)
        self._send({"id": number, **reply})

    def _answer_task(self, served: Served, request: dict[str, Any]) -> None:
        try:
            reply = {"task": served.task(request["position"])}
        except Exception as error:
            reply = failure(error, request)
        self._send({"id": request["id"], **reply})

    def _send(self, reply: Reply) -> None:
        with self._sending:
            send(self._replies, reply)

    async def _do(self, request: dict[str, Any]) -> Reply:
        served = await self._environment(request["env"])
        if request["do"] == "load":
            return {"count": await self._read(served.count)}
        if request["do"] == "task":
            return {"task": await self._read(served.task, request["position"])}
        return await served.episode(request["task"], request["base_url"], request["api_key"])

    async def _read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._rows, work, *arguments)

    def _loaded(self, config: dict[str, Any]) -> Served | None:
        served = self._served.get(json.dumps(config, sort_keys=True))
        return served.result() if served is not None and served.done() and served.exception() is None else None

    async def _environment(self, config: dict[str, Any]) -> Served:
        name = json.dumps(config, sort_keys=True)
        if name not in self._served:
            future = self._served[name] = asyncio.get_running_loop().create_future()
            try:
                served = await asyncio.to_thread(Served, config, self._relay)
                await served.open(self._stack)
                future.set_result(served)
            except BaseException as error:
                del self._served[name]
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                future.exception()  # seen
                raise
        return await asyncio.shield(self._served[name])


def failure(error: BaseException, request: dict[str, Any]) -> Reply:
    """An error as a reply, with the names of what is installed where an environment is not."""
    traceback.print_exception(error, limit=-FRAMES)
    reply: Reply = {"error": f"{type(error).__name__}: {error}"}
    if isinstance(error, ModuleNotFoundError) and "not found (tried to import" in str(error):
        reply["known"] = known_environments()
    elif isinstance(error, ImportError):
        reply["import"] = error.name or ""
    return reply


def send(replies: int, reply: Reply) -> None:
    """Write a reply whole."""
    line = memoryview(json.dumps(reply).encode() + b"\n")
    while line:
        line = line[os.write(replies, line) :]


def work(memory: int) -> None:
    """Be the worker: load verifiers, say so, and serve."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.append(sys.path.pop(0))  # the folder of this file, which names the harness
    try:
        import verifiers.v1

        version = verifiers.__version__
    except ImportError as error:
        versions = [one.version for one in metadata.distributions(name="verifiers")]
        send(replies, {"id": 0, "error": f"{type(error).__name__}: {error}", "verifiers": "".join(versions[:1])})
        return
    send(replies, {"id": 0, "verifiers": version})
    asyncio.run(RequestServer(requests, replies).run())


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(memory: int) -> int:
    """Fork the worker and supervise it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal: the run ends this process in order
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        os.close(1)
        return supervise(child)
    code = 1
    try:
        work(memory)
        code = 0
    except BaseException:
        traceback.print_exc(limit=-FRAMES)
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
