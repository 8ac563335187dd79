"""One worker: a process of the server's that judges what it is sent, on one device.

    server -> {"options": {...}, "secret": hex, "parent": PID}     once
    server -> {"id": 7, "source": ..., "problem": {...}}           worker -> {"id": 7, "verdict": {...}}

It dies with the server. Candidates run below it, in the sandbox of the judge, and never in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

from slime_core.parent import die_with
from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.service.frames import MAX_LINE, receive, send
from slime_kernelbench.service.verdicts import infra
from slime_kernelbench.types import Judge, KernelProblem


async def serve(judge: Judge, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Judge until the other end is gone; what comes while another is judged is judged beside it."""
    one_at_a_time = asyncio.Lock()

    async def answer(ask: dict[str, Any]) -> None:
        source = ask["source"]
        try:
            verdict = await judge.judge(source, KernelProblem(**ask["problem"]))
        except Exception as error:  # of the judge itself: said, and the server looks at the device
            verdict = infra("JudgeError", f"{type(error).__name__}: {error}", source=source)
        async with one_at_a_time:
            await send(writer, {"id": ask["id"], "verdict": verdict_to_json(verdict)})

    tasks: set[asyncio.Task[None]] = set()
    try:
        while (ask := await receive(reader)) is not None:
            task = asyncio.create_task(answer(ask))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await judge.aclose()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def run(descriptor: int, make: Callable[[dict[str, Any]], Judge]) -> None:
    """The worker's end of the socket ``descriptor``: hear what the server says first, make a judge of it, serve."""
    with socket.socket(fileno=descriptor) as end:
        reader, writer = await asyncio.open_connection(sock=end, limit=MAX_LINE)
        hello = await receive(reader)
        if hello is None:
            return
        die_with(int(hello["parent"]))
        await serve(make(hello), reader, writer)


def _judge(hello: dict[str, Any]) -> Judge:
    from slime_kernelbench.judge import LocalJudge
    from slime_kernelbench.options import Options
    from slime_kernelbench.secret import Secret

    return LocalJudge(Options(**hello["options"]).judging(), secret=Secret(bytes.fromhex(hello["secret"])))


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), _judge))
