"""The driver of a detached run: a small actor that keeps its process, and the way to find, ask and end it by name.

    slime run --detach -> Driver (detached actor, computes nothing) -> the driver's process -> hosts -> ranks, engines

The process dies with the actor. One that was killed is started again, an actor that was lost is started again by Ray,
on this machine if it is there: either resumes the run. An actor whose run has ended is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RuntimeEnvSetupError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_core.clusters.detached import (
    LETTER,
    LOG,
    PREFIX,
    DetachedDriver,
    Order,
    code_of,
    read_record,
    second_driver_error,
)
from slime_core.errors import ConfigError, SlimeError
from slime_core.report.rundir import RunDir
from slime_ray.joining import NAMESPACE
from slime_ray.travelling import not_set_up

START = 120.0  # seconds in which the actor must have come up
ANSWER = 10.0  # seconds in which a live one responds
LOOK = 1.0  # seconds between looks whether a keeper still is the one
AGAIN, PATIENCE = 0.25, 20.0  # seconds between signals to a process that is to end at once, and of all of them


class Driver:
    """The actor. It responds even while its process is busy."""

    def __init__(self, order: Order) -> None:
        self._order, self._path = order, Path(order.run_dir)
        self._me = ray.get_runtime_context().current_actor
        self._child: subprocess.Popen[bytes] | None = None
        self._name = uuid.uuid4().hex
        self._stop_requested = False
        self._guard = threading.Lock()
        self._watching = threading.Thread(target=self._watch, daemon=True, name="slime-driver")
        self._watching.start()

    async def about(self) -> dict[str, Any]:
        """Its location and its process, once that has started."""
        while self._child is None and self._watching.is_alive():
            await asyncio.sleep(AGAIN / 10)
        child = self._child
        return {
            "run_dir": self._order.run_dir,
            "host": socket.gethostname(),
            "pid": child.pid if child is not None else 0,
            "keeper": os.getpid(),
        }

    async def stop(self, now: bool) -> None:
        """Ask the process to end: in order, once, or at once and then by force."""
        with self._guard:
            again, self._stop_requested, child = self._stop_requested, True, self._child
            if (record := read_record(self._path)) is not None and record.code is None:
                record.asking("now" if now else "stop").write(self._path)
        if child is None or (again and not now):
            return
        child.terminate()
        end = time.monotonic() + PATIENCE
        while now and child.poll() is None:
            await asyncio.sleep(AGAIN)
            child.terminate() if time.monotonic() < end else child.kill()

    def _watch(self) -> None:
        """Keep the process until the run has ended, write down how, and leave."""
        try:
            record = read_record(self._path)
            if record is None or record.code is not None:  # of another machine's disk, or ended as the actor was lost
                return
            with self._guard:
                replace(record, keeper=self._name).write(self._path)
            try:
                code = self._keep(requested=bool(record.asked))
            except OSError as error:  # it cannot be started
                code = SlimeError.exit_code
                with suppress(OSError), (self._path / LOG).open("a") as out:
                    out.write(f"error: the driver cannot be started on {socket.gethostname()}: {error}\n")
            with self._guard:
                record = read_record(self._path) or record
                record.ending(code, RunDir(self._path).read_info().get("epoch") or 0).write(self._path)
        finally:
            ray.kill(self._me)

    def _keep(self, *, requested: bool) -> int:
        """The exit code of the run; if it was stopped before this actor started, that of its last process."""
        if requested:
            return code_of(RunDir(self._path).read_info())
        code = 0
        for _ in range(self._order.restarts + 2):  # the last one says why there is no other
            code = self._run()
            if code >= 0 or self._stop_requested:
                break
        return code if code >= 0 else 128 - code

    def _run(self) -> int:
        order = self._order
        memory = os.memfd_create("slime-letter", 0)
        try:
            os.write(memory, order.letter.encode())
            os.lseek(memory, 0, os.SEEK_SET)
            with self._guard, (self._path / LOG).open("ab") as out:
                if self._stop_requested:
                    return 128 + signal.SIGTERM
                self._child = child = subprocess.Popen(
                    [sys.executable, *order.program, str(os.getpid())],
                    env={**order.environment, **self._modules(), LETTER: str(memory)},
                    cwd=order.folder if Path(order.folder).is_dir() else order.run_dir,
                    pass_fds=(memory,),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            os.close(memory)
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(LOOK)
            self._look()

    def _look(self) -> None:
        """End a process that the cluster gave up, with its machine, and for which it has another keeper by now.

        What Ray knows by the actor's name is that one, which may not be killed for it.
        """
        record = read_record(self._path)
        if record is not None and record.keeper != self._name and self._child is not None:
            self._child.kill()
            self._child.wait()
            os._exit(0)

    def _modules(self) -> dict[str, str]:
        """PYTHONPATH: packages sent to this machine come before the command's."""
        both = [os.environ.get("PYTHONPATH", ""), self._order.environment.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, both))} if any(both) else {}


class Drivers:
    """Detached drivers of the cluster that this process has entered (`joining.entered`)."""

    def submit(self, name: str, order: Order) -> dict[str, Any]:
        """Start one, preferably on this machine; return its description.

        Raises:
            ConfigError: CFG16 one of that name is there, CFG17 it does not come up, CFG19 what travels with it cannot.
        """
        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor_class = ray.remote(Driver).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=order.restarts,
            max_concurrency=100,
            scheduling_strategy=strategy,
        )
        try:
            actor: Any = actor_class.remote(order)
        except ValueError as error:  # Ray's own class for it is one, in every version
            raise second_driver_error(order.run_dir, name) from error
        try:
            answer: Any = ray.get(actor.about.remote(), timeout=START)
        except RuntimeEnvSetupError as error:
            raise not_set_up(error) from error
        except (RayActorError, GetTimeoutError) as error:
            ray.kill(actor)
            raise ConfigError(
                "the driver does not come up on the Ray cluster",
                code="CFG17",
                where=name,
                why=" ".join(str(error).split())[:600],
                fix="ray list actors   shows what became of it; without --detach the driver runs here",
            ) from error
        return dict(answer)

    def names(self) -> list[str]:
        """Actors that keep a driver."""
        actors = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
        return sorted(name for name in actors if name.startswith(PREFIX))

    def find(self, name: str) -> DetachedDriver | None:
        """The driver of that name; None if it never existed or has ended."""
        with _ignore_lost_actor():
            actor: Any = ray.get_actor(name, namespace=NAMESPACE)
            try:
                about: dict[str, Any] = ray.get(actor.about.remote(), timeout=ANSWER)
            except (ActorUnavailableError, GetTimeoutError):
                return DetachedDriver(actor=name, state="restarting", about={})
            return DetachedDriver(actor=name, state="running", about=about)
        return None

    def stop(self, name: str, *, now: bool) -> bool:
        """Request its end; False if it does not respond. One that is gone has ended."""
        try:
            with _ignore_lost_actor():
                actor = ray.get_actor(name, namespace=NAMESPACE)
                ray.get(actor.stop.remote(now), timeout=PATIENCE + ANSWER)
        except (ActorUnavailableError, GetTimeoutError):
            return False
        return True


@contextmanager
def _ignore_lost_actor() -> Iterator[None]:
    """An actor that does not exist, or ends during a call."""
    with suppress(ValueError):
        try:
            yield
        except ActorUnavailableError:
            raise
        except RayActorError as error:
            raise ValueError from error
