"""See the package. ``--behave`` takes words, comma between them; ``--gate`` is a file that must exist first."""

from __future__ import annotations

import _multiprocessing
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.srt.server_args import ServerArgs


def run_server(args: ServerArgs) -> None:
    """Serve until a signal, as ``args.behave`` asks."""
    behave = set(args.behave.split(","))
    print(f"{args=}", flush=True)
    if "talks" in behave:
        print(f"the token is {args.api_key!s}", flush=True)
        print("x" * 5000, flush=True)
    crash = "ends@second" in behave and os.path.exists(os.path.join(os.path.dirname(log()), "crash"))
    if "ends" in behave or crash:
        print("no such model, says SGLang", flush=True)
        sys.exit(3)
    for word in behave:
        if word.startswith("busy@") and not os.path.exists(word[5:]):  # the first time only
            open(word[5:], "w").close()
            print(f"[Errno 98] error while attempting to bind on {args.port}: address already in use", flush=True)
            sys.exit(1)
    if "deaf" in behave:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in behave:
        shared = _share()  # noqa: F841  mapped as long as we live
        semaphore = _semaphore()  # noqa: F841
        model = _model()  # noqa: F841  this too
        tempfile.NamedTemporaryFile(delete=False).close()
        scheduler = multiprocessing.get_context("spawn").Process(target=schedule, args=(args,), daemon=True)
        scheduler.start()
        threading.Thread(target=watch, args=(scheduler,), daemon=True).start()
    while args.gate and not os.path.exists(args.gate):
        time.sleep(0.01)
    try:
        server = Server((args.host, args.port), handler(args, behave))
    except OSError as error:
        print(f"ERROR: {error}".lower(), flush=True)
        sys.exit(1)
    if "mute" not in behave:
        print(f"serving on {args.port}", flush=True)
    server.serve_forever()


def log() -> str:
    """Where our words go."""
    return os.readlink("/proc/self/fd/1")


def schedule(args: ServerArgs) -> None:
    """A child as SGLang spawns it: it got the arguments, the token among them."""
    assert args.api_key
    assert repr(args.api_key) == "'***'"
    print(f"scheduler {os.getpid()} is up", flush=True)
    time.sleep(3600)


def watch(scheduler: Any) -> None:
    """End as SGLang does when a child is gone."""
    scheduler.join()
    text = (
        f"Subprocess scheduler_0 (pid={scheduler.pid}) crashed with exit code {scheduler.exitcode}. Triggering SIGQUIT"
    )
    print(text, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _share() -> mmap.mmap:
    path = f"/dev/shm/sglang_loads_standin_{os.environ.get('STAND_IN_MARK', '')}_{os.getpid()}.shm"
    with open(path, "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def _semaphore() -> object:
    """As those of multiprocessing, whose file is mapped by another name before it gets its own."""
    name = f"/sglang_loads_standin_{os.environ.get('STAND_IN_MARK', '')}_{os.getpid()}"
    return _multiprocessing.SemLock(1, 1, 1, name, False)


def _model() -> mmap.mmap | None:
    """Weights that somebody keeps on this machine."""
    if "STAND_IN_MODEL" not in os.environ:
        return None
    with open(os.environ["STAND_IN_MODEL"], "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Server(ThreadingHTTPServer):
    """Joins a held port, as every asyncio server does."""

    allow_reuse_address = True
    daemon_threads = True


def handler(args: ServerArgs, behave: set[str]) -> type[BaseHTTPRequestHandler]:
    """What answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/health":
                return self.say(503 if "mute" in behave else 200, b"")
            known = not args.api_key or self.headers.get("Authorization") == f"Bearer {args.api_key}"
            if not known and "open" not in behave:
                return self.say(401, b'{"error": "Unauthorized"}')
            if self.path.startswith("/v1/loads"):
                used = args.loads if "stalls" in behave else time.monotonic_ns()
                return self.say(200, json.dumps({"loads": [{"num_used_tokens": used}]}).encode())
            return self.say(200, json.dumps({"model_path": "stand-in", "args": vars(args)}, default=str).encode())

        def say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
