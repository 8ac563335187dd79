"""A process that has imported torch, Megatron and the command line, never ran any, and forks one child a request.

One serves a whole run of tests, however many workers it has: it forks a server for each connection, and ends with its
standard input. Requests, and what answers them, are lines of JSON:

    {"args": [...], "cwd": "...", "log": "...", "env": {...}, "path": [...], "out": "...", "hung": 60,
     "failpoint": "NAME:NTH=kill", "seconds": 1.2, "names": "FILE"}
    {"scripts": [["rank.py", "0"], ["rank.py", "1"]], "log": "...", "env": {...}, "path": [...], "hung": 240}
    -> {"code": -9, "seconds": 0.8, "left": []}
    {"module": "NAME", "log": "...", "env": {...}, "path": [...], "folder": "..."}, and beside it sockets
    -> {"pid": 17}, then {"code": 0}

The child is `slime ARGS` from its first line on; what it is spared is the four seconds of imports, and four more where
it trains by Megatron. Without a GPU nothing is compiled (15 seconds for Megatron's functions), unless ``env`` has
TORCH_COMPILE_DISABLE=0. Its stderr is
``log``, its stdout too where ``out`` names no other file; ``env`` and ``path`` are variables and folders to import
from beside those of this process. ``seconds`` kills it then, after ``hung`` seconds it hangs, ``names`` gets how often
it came to each failpoint. ``scripts`` run at the same time, each in a process of its own; the code is 1 where one
fails. ``module`` is a program that a channel would start, with the other end of its sockets and all of its
environment; it is killed where the connection ends. `slime` of ``args`` has its ranks and engines forked so.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["NO_COLOR"] = "1"
GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"


class Recorder:
    """Stands where an armed failpoint stands, and counts all of them."""

    class Any_:
        def __ne__(self, other: object) -> bool:
            return False

    def __init__(self) -> None:
        self.name, self.nth, self.counts = Recorder.Any_(), -1, Counter[str]()


def import_all() -> None:
    """What a run of the embedded engine and the FSDP2 trainer imports."""
    import torch
    import torch.distributed
    import transformers
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    import slime_cli.main
    import slime_cli.run
    import slime_core.clusters.local
    import slime_core.loop
    import slime_core.trainers.fsdp

    del torch, transformers, modeling_llama, modeling_qwen2, modeling_qwen3, slime_cli, slime_core
    if not GPU:  # what it looks for there at import may not be forked
        import_megatron()


def import_megatron() -> None:
    """All of the Megatron trainer, where megatron-core is installed."""
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("megatron.core.optimizer")
        trainer = import_module("slime_megatron")
        for module in pkgutil.iter_modules(trainer.__path__, f"{trainer.__name__}."):
            import_module(module.name)


def take(request: dict[str, Any]) -> None:
    """In the fork: the environment of a request."""
    import torch._dynamo

    os.environ.update(request.get("env", {}))
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # read when it was imported
    sys.path[:0] = request.get("path", [])


def child(request: dict[str, Any]) -> None:
    """In the fork: the command."""
    from slime_cli.main import main
    from slime_core import failpoints

    os.chdir(request["cwd"])
    take(request)
    import_module("forked_channel").fork_channels()
    recorder = Recorder()
    failpoints.arm(request.get("failpoint") or os.environ.get("SLIME_FAILPOINT", ""))
    if request.get("names"):
        failpoints._armed = recorder  # type: ignore[assignment]
    try:
        if request.get("out"):
            with open(request["out"], "w", encoding="utf-8") as out, redirect_stdout(out):
                os.dup2(out.fileno(), 1)
                code = main(request["args"])
        else:
            code = main(request["args"])
    finally:
        if request.get("names"):
            Path(request["names"]).write_text(json.dumps(recorder.counts))
    sys.exit(code)


def scripts(request: dict[str, Any]) -> None:
    """In the fork: a fork of it for each script."""
    take(request)
    codes = []
    for pid in [fork_script(words) for words in request["scripts"]]:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print("codes", codes)
    sys.exit(int(any(codes)))


def fork_script(words: list[str]) -> int:
    """The process that runs it, as `python SCRIPT ARGS` would."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def become(request: dict[str, Any], fds: list[int]) -> None:
    """In the fork: the program that a channel would start, after what Python does at its start."""
    from slime_core import failpoints

    code: object = 1
    try:
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        take(request)
        failpoints.arm(os.environ.get("SLIME_FAILPOINT", ""))
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        with suppress(ImportError):
            sys.modules.pop("sitecustomize", None)
            import_module("sitecustomize")
        sys.argv = [request["module"], *map(str, fds), str(os.getppid())]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def answer(connection: socket.socket) -> None:
    """Serve one connection until its other end closes it."""
    sys.path.append(str(Path(__file__).parents[2] / "tools"))
    from durability.chaos import HUNG_SECONDS, Kill, run_child

    sys.path.pop()  # a run finds no tools

    def say(**words: Any) -> None:
        connection.sendall(json.dumps(words).encode() + b"\n")

    say(threads=len(os.listdir("/proc/self/task")))
    while text := receive(connection):
        request = json.loads(text[0])
        if "module" in request:
            pid = os.fork()
            if not pid:
                connection.close()
                become(request, text[1])
            for fd in text[1]:
                os.close(fd)
            say(pid=pid)
            ends = [os.pidfd_open(pid), connection]
            if connection in select.select(ends, [], [])[0]:
                break  # the child is killed at the death of its parent
            say(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            continue
        kill = Kill(seconds=request["seconds"]) if request.get("seconds") else None
        ended = run_child(
            lambda request=request: (scripts if "scripts" in request else child)(request),  # type: ignore[misc]
            log=Path(request["log"]),
            kill=kill,
            hung=request.get("hung", HUNG_SECONDS),
        )
        say(**asdict(ended))


def receive(connection: socket.socket) -> tuple[str, list[int]] | None:
    """A line, and the files sent beside it; None at the end."""
    text, files = b"", list[int]()
    while not text.endswith(b"\n"):
        data, fds, *_ = socket.recv_fds(connection, 1 << 16, 8)
        if not data:
            return None
        text, files = text + data, files + fds
    return text.decode(), files


def serve(listener: socket.socket) -> None:
    """Fork a server for each connection, until standard input ends."""
    import_all()
    gc.freeze()  # a child's collections leave alone what it shares with this process
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # servers whose connections have ended
                pass
        if not os.fork():
            listener.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            answer(connection)
            break
        connection.close()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # nothing is left to do for what was imported
