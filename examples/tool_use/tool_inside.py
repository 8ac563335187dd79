"""What the sandbox imports before it forks, and runs in a process of its own for each piece of code."""

from __future__ import annotations

import sys
import traceback

from slime_sandbox import CandidateChannel


def main(channel: CandidateChannel) -> None:
    """Run the Python that comes; what it prints, its traceback too, is what the model will read."""
    source = channel.receive().decode()
    try:
        exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit ends it as it ends any program
        if not isinstance(error, SystemExit):
            below = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(error.with_traceback(below), file=sys.stdout)
    sys.stdout.flush()
    channel.send(b"ended")
