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
from collections.abc import Iterator
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
    crash = os.path.join(os.path.dirname(os.readlink("/proc/self/fd/1")), "crash")  # beside our log
    if "ends" in behave or ("ends@second" in behave and os.path.exists(crash)):
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
        kept = list(share())  # noqa: F841  mapped as long as we live
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


def schedule(args: ServerArgs) -> None:
    """A child as SGLang spawns it: it got the arguments, the token among them."""
    assert args.api_key
    assert repr(args.api_key) == "'***'"
    print(f"scheduler {os.getpid()} is up", flush=True)
    time.sleep(3600)


def watch(scheduler: Any) -> None:
    """End as SGLang does when a child is gone."""
    scheduler.join()
    code = f"crashed with exit code {scheduler.exitcode}"
    print(f"Subprocess scheduler_0 (pid={scheduler.pid}) {code}. Triggering SIGQUIT", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def share() -> Iterator[object]:
    """Shared memory, a semaphore, whose file is mapped by another name first, and weights that somebody else keeps."""
    name = f"sglang_loads_standin_{os.environ.get('STAND_IN_MARK', '')}_{os.getpid()}"
    with open(f"/dev/shm/{name}.shm", "w+b") as file:
        file.truncate(4096)
        yield mmap.mmap(file.fileno(), 4096)
    yield _multiprocessing.SemLock(1, 1, 1, f"/{name}", False)
    if "STAND_IN_MODEL" in os.environ:
        with open(os.environ["STAND_IN_MODEL"], "rb") as file:
            yield mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


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
                return self.say(503 if "mute" in behave else 200)
            known = not args.api_key or self.headers.get("Authorization") == f"Bearer {args.api_key}"
            if not known and "open" not in behave:
                return self.say(401, error="Unauthorized")
            if self.path.startswith("/v1/loads"):
                used = args.loads if "stalls" in behave else time.monotonic_ns()
                return self.say(200, loads=[{"num_used_tokens": used}])
            return self.say(200, model_path="stand-in", args=vars(args))

        def say(self, status: int, **words: Any) -> None:
            body = json.dumps(words, default=str).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
