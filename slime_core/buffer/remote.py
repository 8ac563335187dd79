"""A ledger that another process owns: every call is a message with a number, sent again until it is answered.

A connection that breaks, or a server that starts anew, is waited for; what had no answer goes again in the same
order, under the same numbers, and is applied once. Calls fail only when the server cannot be reached for ``deadline``
seconds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slime_core.buffer import messages as m
from slime_core.buffer.messages import Message
from slime_core.durable import FileMark
from slime_core.errors import SlimeError, StorageError
from slime_core.protocols import Drops, Recalled, Turn
from slime_core.types import Batch, Group, Sample

DEADLINE = 60.0
PAUSES = (0.01, 0.05, 0.2, 0.5)  # seconds between tries to connect; the last one again and again


class RemoteLedger:
    """`protocols.Ledger` over the unix socket of a `LedgerServer`. Belongs to one event loop.

    Example:
        ledger = RemoteLedger(run_dir / "ledger.sock", token)
        await ledger.finish(group)
        await ledger.close()

    Every call raises StorageError where the server refuses this process, or cannot be reached for ``deadline``
    seconds; otherwise what `SqliteLedger` raises.
    """

    def __init__(self, path: Path, token: str, *, deadline: float = DEADLINE) -> None:
        self._path, self._token, self._deadline = path, token, deadline
        self.client = secrets.token_hex(8)
        self._last = 0  # number of the last message
        self._acknowledged = 0  # up to here every answer has come
        self._open: dict[int, tuple[Message, asyncio.Future[Message]]] = {}  # without an answer, in order
        self._writer: asyncio.StreamWriter | None = None
        self._link: asyncio.Task[None] | None = None
        self._due = 0.0  # when the server must have been reached
        self._closed = False

    async def issue(self, groups: Sequence[Group]) -> None:
        """See `protocols.Ledger`."""
        await self._call("issue", m.pack_issue(groups))

    async def finish(self, group: Group, drops: Drops = ()) -> None:
        """See `protocols.Ledger`."""
        kept, gone = m.pack_group(group), m.pack_drops(drops)
        await self._call("finish", Message({**kept.header, **gone.header}, kept.payloads + gone.payloads))

    async def drop(self, drops: Drops) -> None:
        """See `protocols.Ledger`."""
        await self._call("drop", m.pack_drops(drops))

    async def recall(self, prompt_ids: Sequence[str]) -> dict[str, Recalled]:
        """See `protocols.Ledger`."""
        return m.unpack_recalled(await self._call("recall", Message({"ids": list(prompt_ids)})))

    async def suspend(self, turns: Mapping[str, Sequence[Turn]]) -> None:
        """See `protocols.Ledger`."""
        await self._call("suspend", m.pack_turns(turns))

    async def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[Turn]]:
        """See `protocols.Ledger`."""
        return m.unpack_turns(await self._call("suspended", Message({"ids": list(ids), "before": before})))

    async def rewind(self, version: int) -> None:
        """See `protocols.Ledger`."""
        await self._call("rewind", Message({"version": version}))

    async def journal(self, batch: Batch) -> None:
        """See `protocols.Ledger`."""
        header = {"version": batch.version + 1, "stage": batch.stage, "ids": list(batch.sample_ids)}
        await self._call("journal", Message(header))

    async def trained(self, version: int, fingerprint: str = "") -> None:
        """See `protocols.Ledger`."""
        await self._call("trained", Message({"version": version, "fingerprint": fingerprint}))

    async def composition(self, version: int) -> list[str]:
        """See `protocols.Ledger`."""
        found: list[str] = (await self._call("composition", Message({"version": version}))).header["value"]
        return found

    async def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`."""
        return m.unpack_samples(await self._call("samples", Message({"ids": list(ids)})))

    async def prune(self, before_version: int) -> None:
        """See `protocols.Ledger`."""
        await self._call("prune", Message({"version": before_version}))

    async def counts(self) -> Mapping[str, int]:
        """See `protocols.Ledger`."""
        found: dict[str, int] = (await self._call("counts", Message({}))).header["value"]
        return found

    async def backup(self, path: Path) -> FileMark:
        """See `SqliteLedger`; the owner writes the copy."""
        return FileMark(**(await self._call("backup", Message({"path": str(path.absolute())}))).header["value"])

    async def close(self) -> None:
        """Close the connection; the ledger stays open. Calls that wait fail. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None and not self._open:
            self._send(self._writer, Message({"op": "bye", "message": self._last + 1}))
            with suppress(ConnectionError):
                await self._writer.drain()
        if self._link is not None:
            self._link.cancel()
            await asyncio.gather(self._link, return_exceptions=True)
        self._fail(StorageError("the ledger is closed", where=str(self._path)))

    async def _call(self, op: str, message: Message) -> Message:
        if self._closed:
            raise StorageError("the ledger is closed", where=str(self._path))
        if sum(map(len, message.payloads)) > m.PAYLOAD_BYTES:
            raise StorageError(f"{op}: more than {m.PAYLOAD_BYTES >> 30} GiB in one call", where=str(self._path))
        self._last += 1
        number = self._last
        message.header |= {"op": op, "message": number}
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._open[number] = (message, answer)
        if self._link is None or self._link.done():
            self._link = asyncio.create_task(self._stay_connected())
        elif self._writer is not None:
            self._send(self._writer, message)
        found = await answer
        if "error" in found.header:
            raise m.unpack_error(found.header)
        return found

    def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        message.header["acknowledged"] = self._acknowledged
        writer.write(message.frame())

    async def _stay_connected(self) -> None:
        """Connect and hand out answers, again and again, until nobody is there for the deadline."""
        loop, tries = asyncio.get_running_loop(), 0
        self._due = loop.time() + self._deadline
        while True:
            why = "it closed the connection"
            try:
                async with asyncio.timeout_at(self._due):
                    reader = await self._connect()
                await self._hand_out(reader)
            except (SlimeError, OSError, asyncio.IncompleteReadError, ValueError) as error:
                if isinstance(error, SlimeError):
                    self._fail(error)
                    return
                why = str(error) or type(error).__name__
            finally:
                self._drop_connection()
            if self._due == float("inf"):  # it answered before it went
                self._due, tries = loop.time() + self._deadline, 0
            if loop.time() >= self._due:
                self._fail(self._silent(why))
                return
            await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    async def _connect(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._writer = writer
        writer.write(Message({"client": self.client, "token": self._token}).frame())
        hello = (await m.receive(reader)).header
        if "error" in hello:
            raise m.unpack_error(hello)
        for message, _ in list(self._open.values()):
            self._send(writer, message)
        return reader

    async def _hand_out(self, reader: asyncio.StreamReader) -> None:
        while True:
            found = await m.receive(reader)
            self._due = float("inf")
            _, answer = self._open.pop(int(found.header["message"]), (None, None))
            self._acknowledged = min(self._open, default=self._last + 1) - 1
            if answer is not None and not answer.done():
                answer.set_result(found)

    def _drop_connection(self) -> None:
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.close()
            self._writer = None

    def _fail(self, error: SlimeError) -> None:
        waiting, self._open = list(self._open.values()), {}
        for _, answer in waiting:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # a call that was cancelled looks at it no more

    def _silent(self, why: str) -> StorageError:
        return StorageError(
            f"the ledger's server cannot be reached for {self._deadline:g} s",
            where=str(self._path),
            why=why,
            fix="see why the process that owns the ledger has ended, then: slime run --resume RUN_DIR",
        )
