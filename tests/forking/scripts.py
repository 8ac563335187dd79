"""A command that runs a Python script in a fork of a process that has imported what the script imports.

    with forking("mcp", ["mcp.server"]):
        Popen([*python("mcp"), "server.py", "8000"], stdin=PIPE)     as [sys.executable, "server.py", "8000"] would

To whoever started it the command is the script: it ends as the script does, hands SIGTERM and SIGINT on, and takes
the script along when it is killed.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path


def python(name: str) -> list[str]:
    """The command, without the script; it needs ``forking`` of that name when it is started."""
    return [sys.executable, "-I", "-S", __file__, name]


@contextmanager
def forking(name: str, modules: Sequence[str]) -> Iterator[None]:
    """What forks for the commands of ``name``, which is one of this machine's."""
    command = [sys.executable, __file__, "serve", name, *modules]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield
        server.kill()


def command(name: str, words: list[str]) -> int:
    """Have the script run; its exit code, negative where a signal ended it."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0{name}")
        order = json.dumps({"words": words, "folder": os.getcwd(), "env": dict(os.environ)}).encode()
        socket.send_fds(line, [len(order).to_bytes(4, "big")], [0, 1, 2])
        line.sendall(order)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: line.send(bytes([number])))
        for descriptor in (0, 1):
            os.close(descriptor)  # the script's alone: they close with it
        return int(line.recv(16) or -signal.SIGKILL)


def serve(name: str, modules: list[str]) -> None:
    """A fork for each command."""
    for module in modules:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        print("ready", flush=True)
        while True:
            line, _ = listener.accept()
            with line:
                if not os.fork():
                    attend(line)


def attend(line: socket.socket) -> None:
    """In the fork: the script in another one, and what its command says of it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(line, 4, 3)
    order = json.loads(line.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    pid = os.fork()
    if not pid:
        line.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        run(**order)
    for descriptor in descriptors:
        os.close(descriptor)
    end = os.pidfd_open(pid)
    with suppress(OSError):  # the command is gone
        while end not in (ready := select.select([line, end], [], [])[0]):
            os.kill(pid, (line.recv(1) or bytes([signal.SIGKILL]))[0])
        line.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(bool(ready))


def run(words: list[str], folder: str, env: dict[str, str]) -> None:
    """As `python SCRIPT ARGS` would, or `python -c TEXT ARGS`."""
    code: object = 1
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    try:
        if words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    ended = command(sys.argv[1], sys.argv[2:])
    if ended < 0:
        with suppress(OSError):  # of SIGKILL
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
