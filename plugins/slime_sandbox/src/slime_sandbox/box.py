"""The driver's side of the sandbox: one warm fork server, started again within a budget, and candidates in it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Self

from slime_core.errors import SandboxError
from slime_core.notices import notice
from slime_sandbox.cgroups import Groups
from slime_sandbox.child import CandidateEnded, CandidateProcess
from slime_sandbox.keeper import BOOT
from slime_sandbox.levels import FIRST_USER, WAYS
from slime_sandbox.selftest import Witness, witness
from slime_sandbox.types import Limits, Outcome, Policy
from slime_sandbox.view import devices, readable
from slime_sandbox.wire import collect, packet_pair, post

START_SECONDS = 300.0
"""To import what is preloaded, on a busy machine."""
SHOWN = 2000
SHORT = frozenset({errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What this process or the machine lacks: the fork server is well, and others' candidates are in it."""
OF_GPUS = ("LD_LIBRARY_PATH", "CUDA_HOME", "TRITON_LIBCUDA_PATH", "TRITON_PTXAS_PATH", "NVIDIA_DRIVER_CAPABILITIES")
"""Variables that say where a driver is; passed on where the policy has GPUs."""


class Sandbox:
    """A warm fork server behind a policy; make one with :meth:`open`. Belongs to the event loop that opened it."""

    def __init__(self, policy: Policy, preload: Sequence[str]) -> None:
        self._policy, self._preload = policy, tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._starts = 0
        self.groups = Groups.find()
        self.level = ""
        self.layers: tuple[str, ...] = ()
        self.witnesses: tuple[Witness, ...] = ()  # the self-test's, a layer each
        self.missing: SandboxError | None = None  # why this is not the first choice of level "auto", or of "medium"

    @classmethod
    async def open(cls, policy: Policy | None = None, preload: Sequence[str] = ()) -> Self:
        """Start the fork server with ``preload`` imported; the modules of entries belong there.

        To be called on a thread that lasts: the kernel ends everything with the thread that started it.
        Raises `SandboxError` where the policy's level is out of reach, or a module cannot be imported or forked.
        """
        box = cls(policy or Policy(), preload)
        try:
            await box._reach()
        except BaseException:
            await box.aclose()
            raise
        return box

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the fork server and every candidate."""
        await self._end()
        if self.groups is not None:
            self.groups.close()

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def spawn(
        self,
        entry: str,
        *,
        limits: Limits | None = None,
        files: Mapping[str, bytes] | None = None,
        gpu: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CandidateProcess:
        """A candidate's process running ``entry`` ("package.module:function"), a trusted ``function(channel)``.

        ``files`` are written into its folder, its working directory; ``gpu`` is the UUID of the one GPU that it sees.
        """
        limits, files = limits or Limits(), dict(files or {})
        if any(not name or "/" in name or name in (".", "..") for name in files):
            raise ValueError(f"names of files, not paths: {sorted(files)}")
        variables = {"CUDA_VISIBLE_DEVICES": gpu or ""} | dict(environment or {})
        request = {"entry": entry, "limits": asdict(limits), "files": list(files), "environment": variables}
        return CandidateProcess(
            self, request | {"gpu": bool(gpu), "devices": devices(gpu)}, limits, files, self.level, self.layers
        )

    async def run(
        self,
        entry: str,
        payload: bytes = b"",
        limits: Limits | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        gpu: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Send one message, take one answer: ``Outcome.result``. "ok" without an answer is "died"."""
        async with self.spawn(entry, limits=limits, files=files, gpu=gpu, environment=environment) as child:
            sending = asyncio.ensure_future(child.send(payload))
            try:
                result = await child.receive()
                outcome = replace(await child.finish(), result=result)
            except CandidateEnded as ended:
                outcome = ended.outcome
                if outcome.status == "ok":
                    outcome = replace(outcome, status="died", reason="ended without an answer")
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError):
                    await sending
        return outcome

    async def submit(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Hand a candidate's request to the keeper; starts a dead one again. For `CandidateProcess`."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await self._restart()
            assert self._control is not None
            try:
                post(self._control, request, descriptors)
            except OSError as error:
                if error.errno in SHORT:
                    raise
                await self._restart()
                post(self._control, request, descriptors)

    async def _restart(self) -> None:
        if self._starts > self._policy.restarts:
            raise SandboxError(
                f"the sandbox's fork server died {self._starts} times",
                code="SBX140",
                why="it never runs a candidate, so the machine or a preloaded module is at fault",
                fix="see the kernel's log for processes killed for memory",
            )
        await self._end()
        await self._start(self.level, self.layers)

    async def _reach(self) -> None:
        """Start at the policy's level, or at the best there is."""
        policy_level = self._policy.level
        if policy_level == "none" and not self._policy.i_trust_this_code:
            raise SandboxError(
                "sandbox level 'none' runs code from a model with your rights",
                code="SBX134",
                where="reward.sandbox_level",
                why="nothing but time and memory is limited there",
                fix="--sandbox-level auto, or --i-trust-this-code true",
            )
        refused = []
        for level in ("strong", "medium") if policy_level == "auto" else (policy_level,):
            for layers in WAYS[level]:
                try:
                    await self._start(level, layers)
                    self.witnesses = await witness(self)
                except SandboxError as error:
                    if error.code != "SBX134":
                        raise
                    refused.append(error)
                    await self._end()
                else:
                    if refused:
                        self.missing = refused[0]
                        notice(("sandbox", level), f"the sandbox is at level {level}: {refused[0].what}")
                    return
        raise refused[-1] if policy_level == "auto" else refused[0]

    async def _start(self, level: str, layers: tuple[str, ...]) -> None:
        self._starts += 1
        self.level, self.layers = level, layers
        parent_end, child_end = packet_pair()
        self._control = parent_end
        with tempfile.TemporaryFile() as log, child_end:
            words = [str(child_end.fileno()), str(os.getpid()), json.dumps([path for path in sys.path if path])]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", BOOT, *words],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd="/",
            )
            child_end.close()
            post(parent_end, self._setup())
            reply = await self._hear(parent_end)
            if reply is None:
                log.seek(0)
                reason = log.read()[-SHOWN:].decode(errors="replace")
                raise SandboxError("the sandbox's fork server did not start", code="SBX00", why=reason)
            if "error" in reply:
                raise SandboxError(**reply["error"])

    def _setup(self) -> dict[str, Any]:
        policy = self._policy
        places = readable(self._preload, policy.readable, policy.gpu)
        chosen = {"level": self.level, "layers": self.layers, "user": FIRST_USER + os.getpid()}
        return chosen | {"preload": self._preload, "readable": places, "gpu": policy.gpu}

    @staticmethod
    async def _hear(sock: socket.socket) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
        try:
            await asyncio.wait_for(readable, START_SECONDS)
        finally:
            loop.remove_reader(sock)
        return collect(sock)[0]

    def _environment(self) -> dict[str, str]:
        threads = str(self._policy.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        fixed = {
            "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "USER": "candidate",
            "LOGNAME": "candidate",
        }
        if self._policy.gpu:
            fixed |= {name: os.environ[name] for name in OF_GPUS if name in os.environ}
        return fixed | dict.fromkeys(names, threads) | dict(self._policy.environment)
