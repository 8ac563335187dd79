"""Starts SGLang: the one file of ours that runs in SGLang's environment, with the stdlib and sglang alone.

    driver --one JSON line, then silence--> supervisor (stdin) --the same line--> server (stdin) --spawn--> schedulers

Nobody of ours imports it: `server.Server` runs the file with SGLang's python. The supervisor leads a session of its
own. The pipe on its stdin is its lifeline: when the driver ends, however it ends, the pipe closes and every process of
the session is killed, their files in /dev/shm and their temporary folder too. It does the same when the server ends
(and then ends the same way), and on SIGTERM after a grace. It is a process of its own and tiny, so that neither a busy
interpreter nor a crash of the server keeps it from that.

The token comes in the pipe, so no list of processes shows it, and SGLang's dump of its arguments shows ``***``.
"""

from __future__ import annotations

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # the modules beside this file are called server, client, ...: nobody may import them by accident

import ctypes
import getpass
import json
import select
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress

GRACE = 10.0  # seconds that a server has to end by itself after SIGTERM
LOOK = 1.0  # seconds between looks at the files that the session has in shared memory
SHARED = "/dev/shm/"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Token(str):
    """A string that shows in no dump of an object that holds it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


# -- the server


def serve() -> None:
    """Become the server: arguments and token come on stdin; the supervisor's end is ours."""
    supervisor = os.getppid()
    request = json.loads(sys.stdin.buffer.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.setpgid(0, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    code = 1
    try:
        PROGRAMS[request.get("program", "server")](request["arguments"], request["token"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary end would wait for SGLang's processes; the supervisor ends them


def run_server(arguments: list[str], token: str) -> None:
    """SGLang's server, until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(arguments)
    if token:
        server_args.api_key = Token(token)
    run_server(server_args)


def run_router(arguments: list[str], token: str) -> None:
    """SGLang's router, until it ends. Its own entry would import all of SGLang first, which takes seconds."""
    import argparse

    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser("sglang_router")
    RouterArgs.add_cli_args(parser)
    router_args = RouterArgs.from_cli_args(parser.parse_args(arguments))
    router_args.api_key = Token(token)
    Router.from_args(router_args).start()


PROGRAMS = {"server": run_server, "router": run_router}


# -- the supervisor


class Supervisor:
    """Lives as long as the server does, and not longer than the driver."""

    def __init__(self) -> None:
        self.driver, self.session = os.getppid(), os.getsid(0)
        self.shared: set[str] = set()  # files there that are the session's
        self.listed: set[str] = set()  # what lay there at the last look, and whether that was new
        self.news = False
        self.folder = ""  # for temporary files; it goes with us
        self.wake, poke = os.pipe()
        os.set_blocking(poke, False)
        signal.set_wakeup_fd(poke)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the server leaves behind becomes ours, and is reaped

    def run(self) -> int:
        """Start the server, wait for the end of it or of the driver, and return how the server ended."""
        request = _line(0)
        if not request:
            return 1  # the driver went before it had asked
        self.folder = json.loads(request)["folder"]
        server = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "serve"], stdin=subprocess.PIPE, env=self.environment()
        )
        assert server.stdin is not None
        with suppress(OSError):
            server.stdin.write(request)
            server.stdin.close()
        self.watch(server)
        self.end()
        code = server.wait()
        with suppress(ChildProcessError):
            while True:
                os.wait()  # processes of the server that became ours: no zombie stays
        return code

    def environment(self) -> dict[str, str]:
        """Temporary files go to a folder that goes with us; caches that are worth keeping stay where they were."""
        user = getpass.getuser()
        env = dict(os.environ)  # new names go last: setproctitle finds nothing where the first one is set anew
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
        env.setdefault("SGL_FORCE_SHUTDOWN", "1")  # else one refused request, which SGLang never forgets, keeps it
        env["TMPDIR"] = self.folder
        return env

    def watch(self, server: subprocess.Popen[bytes]) -> None:
        """Return when the session is to be killed."""
        deadline = float("inf")
        while True:
            readable, _, _ = select.select([0, self.wake], [], [], max(0.0, min(LOOK, deadline - time.monotonic())))
            if self.wake in readable:
                for number in os.read(self.wake, 1024):
                    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and deadline == float("inf"):
                        self.look(always=True)
                        deadline = time.monotonic() + GRACE
                        server.terminate()
            if (0 in readable and not os.read(0, 1024)) or os.getppid() != self.driver:
                return self.say("the process that started this server is gone")
            if server.poll() is not None:
                return self.say(f"the server's process {server.pid} {_end_of(server.returncode)}")
            if time.monotonic() >= deadline:
                return self.say(f"the server did not end within {GRACE:g} s of SIGTERM")
            self.look()

    def say(self, text: str) -> None:
        """A line of ours in the server's log."""
        with suppress(OSError):
            os.write(2, f"[slime] {text}\n".encode())

    def look(self, *, always: bool = False) -> None:
        """Remember what the session has in shared memory: after it is dead, nobody could tell.

        Processes are looked at when something new lies there, and once more after that: it is mapped a moment later.
        """
        listed = set(os.listdir(SHARED))
        again, self.news, self.listed = self.news, bool(listed - self.listed), listed
        if not (always or again or self.news):
            return
        paths = _mapped(self.others()) - self.shared
        if paths:
            self.shared |= paths
            with suppress(OSError), open(os.path.join(self.folder, "shared-memory"), "w") as file:
                file.write("".join(f"{path}\n" for path in sorted(self.shared)))  # for the driver, should we be killed

    def others(self) -> list[int]:
        """Every other process of the session."""
        processes = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                    if int(fields[3]) == self.session and fields[0] not in "ZX":
                        processes.append(int(name))
        return processes

    def end(self) -> None:
        """Kill every other process of the session, wait for them, and remove what they have left."""
        self.look(always=True)
        while alive := self.others():
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for path in self.shared - _mapped(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with suppress(OSError):
                os.unlink(path)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _mapped(pids: Iterable[int]) -> set[str]:
    """Files of shared memory that processes have mapped; folders there are a person's, as a model may be.

    They are found by their inodes: a semaphore was mapped before its file got the name that it has.
    """
    mapped = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps") as file:
            mapped |= {line.split(maxsplit=5)[4] for line in file if SHARED in line}
    with os.scandir(SHARED) as entries:
        return {entry.path for entry in entries if str(entry.inode()) in mapped and not entry.is_dir()}


def _line(source: int) -> bytes:
    """One line of a pipe, and not a byte of what comes after it; empty where it closes before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(source, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _end_of(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def supervise() -> int:
    """Run the supervisor; its end is the server's own, signal and all."""
    supervisor = Supervisor()
    try:
        code = supervisor.run()
    finally:
        supervisor.end()
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server wrote its core, if it was to write one
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":  # SGLang's processes are spawned, and read this file again
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(supervise())
