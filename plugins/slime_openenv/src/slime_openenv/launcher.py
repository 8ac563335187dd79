"""Runs a server's command, and ends it and all it has started when the process that started this one closes stdin.

    python -m slime_openenv.launcher COMMAND...      # in a session of its own

That process may have been killed: the kernel closes its end of the pipe all the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial

from slime_core.parent import end_with

GRACE = 3.0
"""Seconds between the request to end and the kill."""


def main() -> None:
    """See the module; the exit code is the command's."""
    try:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=partial(end_with, os.getpid()))
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group's, which is ours too
    threading.Thread(target=_end, args=(child,), daemon=True).start()
    code = child.wait()
    sys.stdout.write(f"the server has ended with code {code}\n")
    sys.stdout.flush()
    os.killpg(0, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(GRACE)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
