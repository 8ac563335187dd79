"""Ways in which an answer goes wrong, for `faulty.FaultProxy`: each is a coroutine over one exchange, or makes one."""

import asyncio
import json
import socket
import struct
from contextlib import suppress

from faulty import closing


def status(code, *, headers=(), body=None):
    """Answer with a status, as SGLang words its errors."""
    said = json.dumps({"error": {"message": f"made up: {code}"}}).encode() if body is None else body

    async def fault(exchange):
        await exchange.say(said, status=f"{code} Made Up", headers=headers)

    return fault


def says(body, kind="application/json"):
    """Answer 200 with this body."""

    async def fault(exchange):
        await exchange.say(body, kind=kind)

    return fault


html = says(b"<!DOCTYPE html><html><title>Printer</title></html>" + b"." * 3000, "text/html")


async def reset(exchange):
    """Cut the connection with RST, before any answer."""
    sock = exchange.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.writer.transport.abort()


async def vanish(exchange):
    """Close in order, before any answer."""


async def hang(exchange):
    """Never answer."""
    await asyncio.Event().wait()


async def slow(exchange):
    """The right answer, a byte at a time, and never at its end."""
    _, body = await exchange.ask()
    await exchange.start()
    for i in range(len(body)):
        await exchange.chunk(body[i : i + 1])
        await asyncio.sleep(0.02)


async def cut_body(exchange):
    """Half of the answer, under the length of the whole."""
    _, body = await exchange.ask()
    await exchange.say(body[: len(body) // 2], length=len(body))


async def cut_chunk(exchange):
    """Half of a chunk."""
    _, body = await exchange.ask()
    await exchange.start()
    exchange.writer.write(f"{len(body):x}\r\n".encode() + body[: len(body) // 2])
    await exchange.writer.drain()


async def half_json(exchange):
    """Half of the JSON, as if it were whole."""
    _, body = await exchange.ask()
    await exchange.say(body[: len(body) // 2])


async def short_length(exchange):
    """A length that is too small."""
    _, body = await exchange.ask()
    await exchange.say(body, length=len(body) - 7)


async def long_length(exchange):
    """A length that is too large."""
    _, body = await exchange.ask()
    await exchange.say(body, length=len(body) + 7)


async def gzip_garbage(exchange):
    """Bytes that are said to be gzip."""
    _, body = await exchange.ask()
    await exchange.say(body, headers=["Content-Encoding: gzip"])


async def huge(exchange):
    """A stated gigabyte, of which some comes."""
    with suppress(ConnectionError):
        await exchange.say(b"[" + b"0," * 5000, length=1 << 30)
        await hang(exchange)


async def endless(exchange):
    """Chunks without end."""
    with suppress(ConnectionError):
        await exchange.start()
        while True:
            await exchange.chunk(b" " * 65536)


async def late(exchange):
    """Let the server answer, keep the answer, and cut the connection: `kept` hands it to another request."""
    exchange.proxy.kept.append((await exchange.ask())[1])
    await reset(exchange)


def begun(computing):
    """Let the server begin (until ``await computing()``) and cut the connection to the client alone; what the server says
    in the end goes to `ended`."""

    async def fault(exchange):
        reader, writer = await asyncio.open_connection("127.0.0.1", exchange.proxy.upstream)
        writer.write(closing(exchange.head) + exchange.body)

        async def wait():
            try:
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                await exchange.proxy.ended.put((head.split()[1].decode(), body))
            finally:
                writer.close()

        task = asyncio.create_task(wait())
        exchange.proxy._tasks.add(task)
        task.add_done_callback(exchange.proxy._tasks.discard)
        await computing()
        await reset(exchange)

    return fault


async def kept(exchange):
    """Answer with what `late` kept."""
    await exchange.say(exchange.proxy.kept.popleft())


def rewrite(change):
    """The answer after ``change(answer)``, which returns another one or changes it in place; bytes are sent as they are."""

    async def fault(exchange):
        head, body = await exchange.ask()
        assert head.split()[1] == b"200", (head, body)
        answer = json.loads(body)
        changed = change(answer)
        changed = answer if changed is None else changed
        await exchange.say(changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return fault


def in_meta(**changes):
    """Rewrite entries of ``meta_info``; a callable gets the old one, None as value removes it."""

    def change(answer):
        for name, value in changes.items():
            old = answer["meta_info"].pop(name, None)
            if value is not None:
                answer["meta_info"][name] = value(old) if callable(value) else value

    return rewrite(change)


def log_prob(value, at=1):
    """Rewrite the log-prob of one new token."""

    def change(answer):
        answer["meta_info"]["output_token_logprobs"][at][0] = value

    return rewrite(change)


def emptied(answer):
    """As if the server had ended the request by itself, before its first token."""
    answer["output_ids"] = []
    answer["meta_info"] |= {
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "output_token_logprobs": [],
        "completion_tokens": 0,
    }


def _one_more(answer):
    answer["output_ids"].append(5)
    answer["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])


def _echo(answer):
    answer["output_ids"][:0] = [3, 4, 12]


BROKEN = [reset, vanish, cut_body, cut_chunk, half_json, short_length, long_length, gzip_garbage]
"""Answers that are lost on the way."""

REJECTED = {
    "fewer log-probs": (in_meta(output_token_logprobs=lambda old: old[:-1]), "ENG79"),
    "no log-probs": (in_meta(output_token_logprobs=None), "ENG79"),
    "NaN": (log_prob(float("nan")), "ENG80"),
    "null": (log_prob(None), "ENG80"),
    "above zero": (log_prob(0.25), "ENG80"),
    "minus infinity": (log_prob(float("-inf")), "ENG80"),
    "more tokens": (rewrite(_one_more), "ENG82"),
    "prompt echoed": (rewrite(_echo), "ENG82"),
    "no version": (in_meta(weight_version=None, weight_versions=None), "ENG83"),
    "older": (in_meta(weight_version="3.6", weight_versions=None), "ENG83"),
    "newer": (in_meta(weight_version="3.8", weight_versions=None), "ENG83"),
    "of another epoch": (in_meta(weight_version="2.7", weight_versions=None), "ENG83"),
}
"""Answers that cannot be, to a request of tokens 3, 4, 12 for 8 tokens where version 7 of epoch 3 alone may serve."""
