"""End a child process with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which started it, is gone; at once if it is.

    Signals that a terminal or a scheduler sends to all processes of a run are left to the parent: it ends its children
    when it has written what it needs. The kernel counts the thread that started the child as the parent, so a child is
    started from a thread that lives as long as the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(parent)


def end_with(parent: int) -> None:
    """The same for a process that hears signals itself."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)
