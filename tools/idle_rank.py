"""A trainer rank that computes nothing, for `bench_overhead.py --ranks`: it reads its frames and answers at once.

python -m idle_rank FD PARENT_PID
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np

from slime_core.clusters.channel import die_with
from slime_core.clusters.wire import receive_blocking, send_blocking
from slime_core.trainers.portion import Seat
from slime_core.weights.flops import Flops


def answer(call: dict[str, Any]) -> Any:
    """Columns of the portion's rows, or figures."""
    if call["method"] == "score":
        portion, roles = call["args"]
        rows = np.full(len(portion.batch.loss_mask), -1.0, np.float32)
        return {role: {"log_probs": rows, "entropy": rows} for role in roles}
    return {"loss": 0.0, "grad_norm": 1.0, "lr": 1e-6, "optimizer_steps": 1.0} if call["method"] == "step" else None


def main() -> None:
    """Serve until the driver closes the socket."""
    die_with(int(sys.argv[2]))
    sock = socket.socket(fileno=int(sys.argv[1]))
    hello = receive_blocking(sock)
    send_blocking(sock, {"value": ""})
    receive_blocking(sock)
    flops = Flops(token=1e9, pair=1e5)
    send_blocking(sock, {"value": Seat(number=hello["rank"], ranks=hello["world"], over=1, flops=flops)})
    while (call := receive_blocking(sock))["method"] != "close":
        send_blocking(sock, {"value": answer(call)})


if __name__ == "__main__":
    main()
