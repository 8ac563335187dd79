"""The processes of a run: each request goes to one that lives, and an episode ends in a result or in a reason."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError, nearest, shortened
from slime_verifiers.process import EnvironmentProcess, ProcessLost

if TYPE_CHECKING:
    from slime_chat import Session
    from slime_verifiers.options import EnvironmentOptions, Options

FAILED_IN_A_ROW = 3  # episodes after which a process is replaced: it may be short of memory or sockets
TO_STOP = 5.0  # seconds that an episode has to end after it was told to
LONGEST = 1500  # characters of an environment's error


class Failed(Exception):
    """An episode without a result; its text says why."""


class NoReply(ConfigError):
    """A process was lost, or did not reply in time."""


class WorkerPool:
    """See the module.

    Example:
        pool = WorkerPool(options)
        pool.load(environment, evaluation=False)      # tasks, or None where they do not end
        await pool.episode(environment, task, session, 60, evaluation=False)
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._processes: dict[str, list[EnvironmentProcess]] = {}  # by interpreter
        self._lock = threading.Lock()

    def load(self, environment: EnvironmentOptions, *, evaluation: bool) -> int | None:
        """Load an environment in one process; its number of tasks, None where they do not end.

        Raises:
            ConfigError: CFG05 no such interpreter, package or environment, or it does not load.
        """
        count: int | None = self._ask(environment, evaluation, do="load")["count"]
        return count

    def task(self, environment: EnvironmentOptions, position: int, *, evaluation: bool) -> dict[str, Any]:
        """The data of a task.

        Raises:
            ConfigError: as :meth:`load`.
        """
        ask = partial(self._ask, environment, evaluation, do="task", position=position)
        try:
            data: dict[str, Any] = ask()["task"]
        except NoReply:  # an episode has ended the process, or holds it: a new one has the task too
            data = ask()["task"]
        return data

    async def episode(
        self,
        environment: EnvironmentOptions,
        task: dict[str, Any],
        session: Session,
        seconds: float,
        *,
        evaluation: bool,
    ) -> dict[str, Any]:
        """Play a task once against the model of a session, for so many ``seconds`` at most.

        Raises:
            Failed: the environment raised, died, took too long or returned what is no reward.
        """
        request = {"task": task, "base_url": session.base_url, "api_key": session.api_key}
        process, number, future = await asyncio.to_thread(
            self._request, environment, evaluation, do="episode", **request
        )
        reply = asyncio.wrap_future(future)
        try:
            result = await _in_time(process, number, reply, seconds)
        except ProcessLost as error:
            raise Failed(f"the environment's process was lost: {error}") from error
        finally:
            if not reply.done():
                process.cancel(number)
        reason = _fault(result)
        if not reason:
            process.failures = 0
        elif not session.aborted:  # else the run stopped it, and the process is as good as before
            process.failures += 1
        if reason:
            raise Failed(shortened(reason, LONGEST))
        return result

    def close(self) -> None:
        """End all processes; blocks until then."""
        with self._lock:
            processes, self._processes = [p for ps in self._processes.values() for p in ps], {}
        for process in processes:
            process.close()

    def _ask(self, environment: EnvironmentOptions, evaluation: bool, **request: Any) -> dict[str, Any]:
        process, number, reply = self._request(environment, evaluation, **request)
        where = f"environment {environment.env!r} in {process.python}"
        try:
            first = process.version.result(self._options.load_seconds)
            result = first if "error" in first else reply.result(self._options.load_seconds)
        except TimeoutError:
            if request["do"] == "task":
                process.close()
            else:
                process.cancel(number)
            fix = "--load-seconds SECONDS   or look at what it waits for"
            raise NoReply(
                f"{environment.env} did not load in {self._options.load_seconds:g} s",
                code="CFG05",
                where=where,
                why=process.last_words() or "it wrote nothing to stderr",
                fix=fix,
            ) from None
        except ProcessLost as error:
            raise NoReply(
                f"{environment.env} did not load: its process was lost",
                code="CFG05",
                where=where,
                why=str(error),
                fix=f"try it alone: {process.python} -m verifiers.v1.cli.eval.main {environment.env} -n 1",
            ) from error
        if "error" in result:
            raise _refusal(result, environment.env, process, where)
        return result

    def _request(
        self, environment: EnvironmentOptions, evaluation: bool, *, do: str, **request: Any
    ) -> tuple[EnvironmentProcess, int, Future[dict[str, Any]]]:
        """Ask the first process for what is the same in all, and the one with the least to do for an episode."""
        python = environment.python or self._options.python or sys.executable
        with self._lock:
            processes = self._processes.setdefault(python, [])
            for process in [one for one in processes if one.lost or _worn(one)]:
                processes.remove(process)
                process.close()
            limit = self._options.processes if do == "episode" else 1
            if len(processes) < limit and not any(one.running == 0 for one in processes):
                processes.append(self._start(python, environment.env))
            process = processes[0] if do != "episode" else min(processes, key=lambda one: one.running)
        block = environment.served(evaluation=evaluation)
        return process, *process.ask(do=do, env=block, **request)

    def _start(self, python: str, name: str) -> EnvironmentProcess:
        try:
            return EnvironmentProcess(python, self._options.memory_mb << 20)
        except OSError as error:
            raise ConfigError(
                f"there is no interpreter {python}",
                code="CFG05",
                where="plugin.verifiers.python",
                why=error.strerror or str(error),
                fix=f"python3 -m venv ENV && ENV/bin/pip install verifiers {name}   then --python ENV/bin/python",
            ) from error


async def _in_time(
    process: EnvironmentProcess, number: int, reply: asyncio.Future[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The reply; an episode that does not even stop when it is told to holds its process, which is then ended."""
    with suppress(TimeoutError):
        return await asyncio.wait_for(asyncio.shield(reply), seconds)
    process.cancel(number)
    with suppress(TimeoutError, ProcessLost):
        await asyncio.wait_for(asyncio.shield(reply), TO_STOP)
    if not reply.done():
        await asyncio.to_thread(process.close)
        with suppress(ProcessLost):
            await reply
    raise Failed(f"the episode took longer than {seconds:g} s (plugin.verifiers.episode_seconds)")


def _worn(process: EnvironmentProcess) -> bool:
    return process.failures >= FAILED_IN_A_ROW and process.running == 0


def _fault(result: dict[str, Any]) -> str:
    """Why an episode has no reward; "" where it has."""
    if "error" in result:
        return str(result["error"])
    if not result["complete"] or not result["traces"]:
        return "; ".join(result["errors"]) or "the environment says that the episode is not complete"
    for trace in result["traces"]:
        numbers = {"reward": trace["reward"], **trace["rewards"], **trace["metrics"]}
        if wrong := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
            return f"no reward: {', '.join(wrong)}"
    return ""


def _refusal(reply: dict[str, Any], name: str, process: EnvironmentProcess, where: str) -> ConfigError:
    """What is missing, and the command that brings it."""
    error, pip = str(reply["error"]), f"{process.python} -m pip install"
    interpreter = "or name the environment's own interpreter: --python ENV/bin/python"
    if reply["id"] == 0:
        message = f"verifiers {reply['verifiers']} is too old" if reply["verifiers"] else "verifiers is not installed"
        fixes = [f'{pip} "verifiers>=0.4"', interpreter]
    elif "known" in reply:
        message, error = f"there is no environment {name!r}", f"installed are: {', '.join(reply['known'])}"
        fixes = [nearest(name, reply["known"]), f"{pip} {name.rpartition('/')[2]}", interpreter]
    elif "import" in reply:
        message, fixes = (
            f"environment {name!r} lacks a package",
            [f"{pip} {reply['import'] or 'PACKAGE'}", interpreter],
        )
    else:
        message, error = f"environment {name!r} does not load", f"{error}\n{process.last_words()}"
        fixes = ["--env-args JSON   with what it takes; export the keys that it reads, such as OPENAI_API_KEY"]
    return ConfigError(message, code="CFG05", where=where, why=error, fix="\n".join(filter(None, fixes)))
