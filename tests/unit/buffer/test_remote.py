"""A ledger over a socket: the contract, messages that come again, servers that end, strangers."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from slime_core.buffer import messages as m
from slime_core.buffer.ledger import SqliteLedger
from slime_core.buffer.messages import Message
from slime_core.buffer.remote import RemoteLedger
from slime_core.buffer.server import LedgerServer
from slime_core.errors import PluginError, StorageError
from slime_core.protocols import Ledger
from slime_core.testing.contracts import LEDGER_CHECKS, sample_group, suspended_turns
from slime_core.types import Drop

pytestmark = pytest.mark.unit

TOKEN = "a token of this run"


@asynccontextmanager
async def served(folder):
    """A ledger, its server and the socket's path."""
    ledger = SqliteLedger(folder)
    path = folder / "l.sock"
    try:
        async with LedgerServer(ledger, path, TOKEN):
            yield ledger, path
        assert not path.exists()
        assert await ledger.audit() == []
    finally:
        await ledger.close()


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(tmp_path, check):
    async def body():
        async with served(tmp_path) as (_, path):
            remote = RemoteLedger(path, TOKEN)
            assert isinstance(remote, Ledger)
            await check(remote)
            await remote.close()

    asyncio.run(body())


def test_many_writers_append_at_once_and_their_calls_share_commits(tmp_path):
    async def body():
        async with served(tmp_path) as (ledger, path):
            commits = []
            db = ledger.commits.db
            await ledger.commits.run(lambda: db.set_trace_callback(lambda text: commits.append(text == "COMMIT")))
            clients = [RemoteLedger(path, TOKEN) for _ in range(8)]

            async def write(number):
                for position in range(number * 10, number * 10 + 10):
                    await clients[number].issue([sample_group(position)])
                    await clients[number].finish(sample_group(position))

            await asyncio.gather(*(write(number) for number in range(8)))
            assert sum(commits) < 160
            assert dict(await clients[0].counts()) == {"issued": 160, "trained": 0, "pending": 160}
            for client in clients:
                await client.close()
            assert await ledger.commits.run(lambda: db.execute("SELECT count(*) FROM applied").fetchone()) == (0,)

    asyncio.run(body())


def test_errors_arrive_as_they_were(tmp_path):
    bad = sample_group(1)
    bad.samples[0].metadata["x"] = object()

    async def body():
        async with served(tmp_path) as (_, path):
            remote = RemoteLedger(path, TOKEN)
            with pytest.raises(PluginError) as caught:
                await remote.finish(bad)
            assert caught.value.code == "PLG57"
            with pytest.raises(StorageError, match="never journaled") as caught:
                await remote.trained(1)
            assert "ledger.sqlite" in caught.value.where
            with pytest.raises(StorageError, match="no call 'destroy'"):
                await remote._call("destroy", Message({}))
            with pytest.raises(StorageError, match="the ledger failed"):
                await remote._call("recall", Message({"ids": 5}))
            assert (await remote.counts())["issued"] == 0
            await remote.close()

    asyncio.run(body())


async def talk(path, *messages, token=TOKEN, client="c"):
    """A client by hand: hello, messages, and as many answers."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(Message({"client": client, "token": token}).frame())
    answers = [await m.receive(reader)]
    for message in messages:
        writer.write(message.frame())
    answers += [await m.receive(reader) for _ in messages]
    writer.close()
    return answers


def call(op, number, message, acknowledged=0):
    message.header |= {"op": op, "message": number, "acknowledged": acknowledged}
    return message


def test_a_message_that_comes_again_is_answered_and_not_applied_again(tmp_path):
    """Between the two another client moved the row on: applied again, the call would be refused."""
    group = sample_group(0)

    async def body():
        async with served(tmp_path) as (ledger, path):
            finish = m.pack_group(group)
            finish.header["drops"] = []
            (_, first) = await talk(path, call("finish", 1, finish))
            await ledger.drop([(group.samples, Drop(reason="x"))])
            finish = m.pack_group(group)
            finish.header["drops"] = []
            (_, again) = await talk(path, call("finish", 1, finish))
            assert first.header == again.header == {"message": 1}
            (_, other) = await talk(path, call("finish", 1, finish), client="another")
            assert "dropped and cannot be finished" in other.header["error"]["what"]

    asyncio.run(body())


def test_a_call_that_failed_is_answered_again_as_it_was_while_its_server_lives(tmp_path):
    """The connection broke before the answer came: what the caller hears does not depend on that."""

    async def body():
        async with served(tmp_path) as (ledger, path):
            (_, first) = await talk(path, call("suspend", 1, m.pack_turns({"main/0-0": suspended_turns("x")})))
            await ledger.issue([sample_group(0)])
            (_, again) = await talk(path, call("suspend", 1, m.pack_turns({"main/0-0": suspended_turns("x")})))
            assert first.header == again.header
            assert "unknown" in again.header["error"]["what"]

    asyncio.run(body())


def test_a_message_that_comes_again_after_a_restart_is_applied_once(tmp_path):
    group = sample_group(0)

    def finish():
        message = m.pack_group(group)
        message.header["drops"] = []
        return call("finish", 7, message)

    async def body():
        async with served(tmp_path) as (ledger, path):
            await talk(path, finish())
            await ledger.drop([(group.samples, Drop(reason="x"))])
        async with served(tmp_path) as (ledger, path):
            (_, again) = await talk(path, finish())
            assert again.header == {"message": 7}
            db = ledger.commits.db
            await talk(path, call("rewind", 8, Message({"version": 0}), acknowledged=7))
            assert await ledger.commits.run(lambda: db.execute("SELECT * FROM applied").fetchall()) == [("c", 8)]

    asyncio.run(body())


def test_a_call_that_failed_is_made_again_after_a_restart(tmp_path):
    async def body():
        turns = m.pack_turns({"main/0-0": suspended_turns("x")})
        async with served(tmp_path) as (ledger, path):
            (_, refused) = await talk(path, call("suspend", 1, turns))
            assert "error" in refused.header
        async with served(tmp_path) as (ledger, path):
            await ledger.issue([sample_group(0)])
            (_, done) = await talk(path, call("suspend", 1, m.pack_turns({"main/0-0": suspended_turns("x")})))
            assert done.header == {"message": 1}
            assert len(await ledger.suspended(["main/0-0"], before=99)) == 1

    asyncio.run(body())


@pytest.mark.parametrize("token", ["", "another token", "a token of this run "])
def test_a_process_without_the_token_is_refused(tmp_path, token):
    async def body():
        async with served(tmp_path) as (_, path):
            assert path.stat().st_mode & 0o077 == 0
            remote = RemoteLedger(path, token)
            with pytest.raises(StorageError, match="does not know this process"):
                await remote.counts()
            await remote.close()

    asyncio.run(body())


def test_a_process_of_another_user_is_refused(tmp_path, monkeypatch):
    from slime_core.buffer import server

    monkeypatch.setattr(server, "_uid", lambda writer: os.getuid() + 1)

    async def body():
        async with served(tmp_path) as (_, path):
            remote = RemoteLedger(path, TOKEN)
            with pytest.raises(StorageError, match="does not know this process"):
                await remote.counts()
            await remote.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 12, b"\x02\x00\x00\x00" + bytes(8) + b"[]", b"\x80\x04\x95pickle" * 9],
    ids=["nothing", "http", "too long", "no object", "pickle"],
)
def test_noise_on_the_socket_harms_nobody(tmp_path, noise):
    async def body():
        async with served(tmp_path) as (_, path):
            for greeted in (False, True):
                reader, writer = await asyncio.open_unix_connection(path)
                if greeted:
                    writer.write(Message({"client": "c", "token": TOKEN}).frame())
                    await m.receive(reader)
                writer.write(noise)
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
            remote = RemoteLedger(path, TOKEN)
            assert (await remote.counts())["issued"] == 0
            await remote.close()

    asyncio.run(body())


def test_calls_wait_for_a_server_that_comes_back(tmp_path):
    """The server ends and begins again while eight writers write; nobody notices, and nothing is doubled."""

    async def body():
        remotes = [RemoteLedger(tmp_path / "l.sock", TOKEN) for _ in range(8)]
        done = [0] * 8

        async def write(number):
            for step in range(12):
                group = sample_group(number * 100 + step)
                await remotes[number].issue([group])
                await remotes[number].finish(group)
                done[number] += 1

        writers = [asyncio.create_task(write(number)) for number in range(8)]
        for goal in (10, 40, 80):
            async with served(tmp_path):
                while sum(done) < goal:
                    await asyncio.sleep(0.001)
        async with served(tmp_path) as (ledger, _):
            await asyncio.gather(*writers)
            assert dict(await ledger.counts()) == {"issued": 192, "trained": 0, "pending": 192}
            for remote in remotes:
                await remote.close()

    asyncio.run(body())


def test_a_server_that_stays_away_is_an_error_with_a_deadline(tmp_path):
    async def body():
        remote = RemoteLedger(tmp_path / "nobody.sock", TOKEN, deadline=0.05)
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            await remote.counts()
        assert "nobody.sock" in caught.value.where
        assert "resume" in caught.value.fix
        async with served(tmp_path) as (_, path):
            remote._path = path
            assert (await remote.counts())["issued"] == 0
        await remote.close()

    asyncio.run(body())


def test_a_closed_one_says_so_and_closes_twice(tmp_path):
    async def body():
        remote = RemoteLedger(tmp_path / "nobody.sock", TOKEN)
        waiting = asyncio.ensure_future(remote.counts())
        await asyncio.sleep(0)
        for _ in range(2):
            await remote.close()
        with pytest.raises(StorageError, match="closed"):
            await waiting
        with pytest.raises(StorageError, match="closed"):
            await remote.counts()

    asyncio.run(body())


def test_a_backup_is_written_by_the_owner(tmp_path):
    async def body():
        async with served(tmp_path) as (_, path):
            remote = RemoteLedger(path, TOKEN)
            await remote.issue([sample_group(0)])
            mark = await remote.backup(tmp_path / "copy.sqlite")
            assert mark.size == (tmp_path / "copy.sqlite").stat().st_size
            await remote.close()

    asyncio.run(body())


SERVER = """
import asyncio, sys
from pathlib import Path
from slime_core.buffer.ledger import SqliteLedger
from slime_core.buffer.server import LedgerServer

async def main():
    ledger = SqliteLedger(Path(sys.argv[1]))
    async with LedgerServer(ledger, Path(sys.argv[1]) / "l.sock", sys.argv[2]):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def start_server(folder):
    child = subprocess.Popen([sys.executable, "-c", SERVER, folder, TOKEN], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def kill(child):
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_an_owner_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    async def body():
        remotes = [RemoteLedger(tmp_path / "l.sock", TOKEN) for _ in range(4)]
        done = [0] * 4

        async def write(number):
            for step in range(25):
                group = sample_group(number * 100 + step)
                await remotes[number].issue([group])
                await remotes[number].finish(group)
                if step % 3 == 0:
                    await remotes[number].drop([(group.samples, Drop(reason="surplus"))])
                done[number] += 1

        writers = [asyncio.create_task(write(number)) for number in range(4)]
        for goal in (8, 50, 100):
            child = await asyncio.to_thread(start_server, tmp_path)
            while sum(done) < goal and not all(task.done() for task in writers):
                await asyncio.sleep(0.001)
            if goal == 100:
                await asyncio.gather(*writers)
            await asyncio.to_thread(kill, child)
        for remote in remotes:
            await remote.close()

    asyncio.run(body())

    async def look():
        ledger = SqliteLedger(tmp_path)
        assert await ledger.audit() == []
        assert dict(await ledger.counts()) == {"issued": 200, "trained": 0, "pending": 128, "dropped/surplus": 72}
        await ledger.close()

    asyncio.run(look())
