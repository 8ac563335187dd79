"""The process that owns a ledger answers others: calls by message, each applied once.

    RemoteLedger --- unix socket, token, same user ---> LedgerServer -> SqliteLedger

A client numbers its messages. Its answer is kept until the client says that it arrived, so a message that comes again
on a new connection is answered, not applied again. What changes rows leaves its number in the database, in the same
transaction, and so does not happen twice after a restart of this process either.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slime_core.buffer import messages as m
from slime_core.buffer.ledger import SqliteLedger
from slime_core.buffer.messages import Message
from slime_core.durable import storage_error
from slime_core.errors import StorageError

PEER = struct.Struct("3i")  # pid, uid, gid
IN_FLIGHT = 512  # calls of one connection that may wait for the disk
Op = Callable[[SqliteLedger, Message], Awaitable[Message]]


class LedgerServer:
    """Serves ``ledger`` at the unix socket ``path`` to processes of this user that know ``token``.

    Example:
        async with LedgerServer(ledger, run_dir / "ledger.sock", token):
            ...

    Raises:
        StorageError: STO110 the socket cannot be made.
    """

    def __init__(self, ledger: SqliteLedger, path: Path, token: str) -> None:
        self._ledger, self._path, self._token = ledger, path, token
        self._answers: dict[str, dict[int, asyncio.Task[Message]]] = {}  # client -> number -> answer
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self._path)
            self._path.chmod(0o600)
        except OSError as error:
            raise storage_error(error, self._path, "the ledger's socket cannot be made") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        tasks = [task for answers in self._answers.values() for task in answers.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        replies: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(IN_FLIGHT)
        try:
            client = await self._greet(reader, writer)
            while client:
                message = await m.receive(reader)
                if message.header.get("op") == "bye":
                    self._answers.pop(client, None)
                    await self._ledger.forget_client(client)
                    break
                await room.acquire()
                number, acknowledged = int(message.header["message"]), int(message.header["acknowledged"])
                reply = asyncio.create_task(self._reply(client, number, acknowledged, message, writer))
                replies.add(reply)
                reply.add_done_callback(replies.discard)
                reply.add_done_callback(lambda done: room.release())
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, TypeError):
            pass  # the client is gone, or does not speak as ours do: it may come again
        finally:
            for reply in replies:
                reply.cancel()
            self._writers.discard(writer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The client's name; empty where it is refused."""
        hello = (await m.receive(reader)).header
        token, client = hello.get("token"), hello.get("client")
        known = isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())
        if not (known and isinstance(client, str) and _uid(writer) == os.getuid()):
            refused = StorageError("the ledger's server does not know this process", why="another token, or user")
            writer.write(Message(m.pack_error(refused)).frame())
            with suppress(ConnectionError):
                await writer.drain()
            return ""
        writer.write(Message({"hello": client}).frame())
        return client

    async def _reply(
        self, client: str, number: int, acknowledged: int, message: Message, writer: asyncio.StreamWriter
    ) -> None:
        answers = self._answers.setdefault(client, {})
        for old in [n for n in answers if n <= acknowledged]:
            del answers[old]
        if number not in answers:
            answers[number] = asyncio.create_task(self._apply(client, number, acknowledged, message))
        answer = await asyncio.shield(answers[number])
        with suppress(ConnectionError):
            writer.write(answer.frame())
            await writer.drain()

    async def _apply(self, client: str, number: int, acknowledged: int, message: Message) -> Message:
        try:
            op = OPS.get(message.header.get("op", ""))
            if op is None:
                raise StorageError(f"the ledger has no call {message.header.get('op')!r}")
            answer = await op(self._ledger.once(client, number, acknowledged), message)
        except Exception as error:  # the client has its answer whatever went wrong, and the server goes on
            answer = Message(m.pack_error(error))
        answer.header["message"] = number
        return answer


async def _issue(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.issue(m.unpack_issue(call))
    return Message({})


async def _finish(ledger: SqliteLedger, call: Message) -> Message:
    group = m.unpack_group(call)
    await ledger.finish(group, m.unpack_drops(call))
    return Message({})


async def _drop(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.drop(m.unpack_drops(call))
    return Message({})


async def _suspend(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.suspend(m.unpack_turns(call))
    return Message({})


async def _recall(ledger: SqliteLedger, call: Message) -> Message:
    return m.pack_recalled(await ledger.recall(call.header["ids"]))


async def _suspended(ledger: SqliteLedger, call: Message) -> Message:
    return m.pack_turns(await ledger.suspended(call.header["ids"], int(call.header["before"])))


async def _samples(ledger: SqliteLedger, call: Message) -> Message:
    return m.pack_samples(await ledger.samples(call.header["ids"]))


async def _journal(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.journal_step(int(call.header["version"]), str(call.header["stage"]), list(call.header["ids"]))
    return Message({})


async def _trained(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.trained(int(call.header["version"]), str(call.header["fingerprint"]))
    return Message({})


async def _rewind(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.rewind(int(call.header["version"]))
    return Message({})


async def _prune(ledger: SqliteLedger, call: Message) -> Message:
    await ledger.prune(int(call.header["version"]))
    return Message({})


async def _composition(ledger: SqliteLedger, call: Message) -> Message:
    return Message({"value": await ledger.composition(int(call.header["version"]))})


async def _counts(ledger: SqliteLedger, call: Message) -> Message:
    return Message({"value": dict(await ledger.counts())})


async def _backup(ledger: SqliteLedger, call: Message) -> Message:
    return Message({"value": asdict(await ledger.backup(Path(call.header["path"])))})


OPS: dict[str, Op] = {
    "issue": _issue,
    "finish": _finish,
    "drop": _drop,
    "suspend": _suspend,
    "recall": _recall,
    "suspended": _suspended,
    "samples": _samples,
    "journal": _journal,
    "trained": _trained,
    "rewind": _rewind,
    "prune": _prune,
    "composition": _composition,
    "counts": _counts,
    "backup": _backup,
}


def _uid(writer: asyncio.StreamWriter) -> int:
    peer: Any = writer.get_extra_info("socket")
    return int(PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])
