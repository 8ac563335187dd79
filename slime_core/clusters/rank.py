"""One trainer rank in a process of its own: it answers Trainer calls and does nothing else.

    python -m slime_core.clusters.rank FD PARENT_PID

The first frame tells rank, world, config and plugin fingerprint, the second where the ranks meet; every later one is a
call.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.clusters.channel import die_with
from slime_core.clusters.looking import show_stacks
from slime_core.clusters.wire import receive_blocking, send_blocking
from slime_core.config.schema import Config
from slime_core.errors import PluginError, SlimeError, StorageError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.plugins.backends import trainer_of
from slime_core.threads import TorchThread

if TYPE_CHECKING:
    from slime_core.trainers.portion import Seat

    Ranked = Any  # a trainer's class of `backends.TrainerBackend`

FRAMES = 3  # innermost frames of an exception's trace in its error; the log has all


def main() -> None:
    """Serve calls until the driver closes the socket."""
    die_with(int(sys.argv[2]))
    show_stacks()
    sock = socket.socket(fileno=int(sys.argv[1]))
    thread: TorchThread | None = None
    try:
        hello = receive_blocking(sock)
        if not _answer(sock, lambda: _look(hello)):
            return
        place: str = receive_blocking(sock)["rendezvous"]
        thread = TorchThread(hello["cpu_threads"])
        made: list[Ranked] = []
        _answer(sock, lambda: _seat(made, _build(hello, place, thread)))
        while made:
            call = receive_blocking(sock)
            if call["method"] == "close":
                break
            _answer(sock, lambda call=call: asyncio.run(_call(made[0], call)))  # type: ignore[misc]
    except EOFError:
        pass
    finally:
        if thread is not None:
            thread.close()
        sock.close()
        os._exit(0)  # a collective that waits for a dead peer must not hold the process


def _look(hello: dict[str, Any]) -> str:
    """Read back what the driver has just written into the run directory; where the ranks meet.

    That is a file in the folder, or, where the driver gives rank 0 an address to meet at, a port there.

    Raises:
        StorageError: STO200 this rank sees another folder, or none: a checkpoint would lack its part.
    """
    file = Path(hello["run_dir"]) / hello["seen"]
    try:
        found = file.read_text()
    except OSError as error:
        found = error.strerror or str(error)
    if found != hello["seen"]:
        raise StorageError(
            f"trainer rank {hello['rank']} does not see the run directory",
            code="STO200",
            where=f"{hello['run_dir']} on {socket.gethostname()}",
            why=f"{hello['seen']}, which the driver wrote there: {found}",
            fix="choose a folder that all ranks share: --run-dir DIR",
        )
    if hello["rank"] == 0 and hello["address"]:
        from slime_core.trainers.meeting import open_meeting

        return open_meeting(hello["address"], hello["world"])
    return str(hello["rendezvous"])


def _build(hello: dict[str, Any], place: str, thread: TorchThread) -> Ranked:
    from slime_core.clusters.embedded import open_folder

    config = Config.model_validate_json(hello["config"])
    plugins = load_plugins(config)
    if plugins.fingerprint() != hello["fingerprint"]:
        raise PluginError(
            f"rank {hello['rank']} loaded other plugins than the driver",
            why=f"fingerprints {plugins.fingerprint()} and {hello['fingerprint']}",
            fix="install the same plugin versions for every process",
        )
    return trainer_of(config).trainer()(
        config,
        plugins,
        open_folder(config),
        thread=thread,
        rank=hello["rank"],
        world=hello["world"],
        device=hello["device"],
        rendezvous=place,
        errors=Path(hello["errors"]),
    )


def _seat(made: list[Ranked], trainer: Ranked) -> Seat:
    """Keep the trainer; what the driver must know of it to deal."""
    made.append(trainer)
    seat: Seat = trainer.seat
    return seat


async def _call(trainer: Ranked, call: dict[str, Any]) -> Any:
    method, args = call["method"], call["args"]
    if method == "begin":
        return await trainer.begin(Config.model_validate_json(args[0]))
    if method == "score":
        return await trainer.score_portion(args[0], frozenset(args[1]))
    if method == "step":
        return await trainer.step_portion(args[0])
    if method in ("save", "restore", "export"):
        return await getattr(trainer, method)(Path(args[0]))
    if method in ("release", "reacquire"):
        return await getattr(trainer, method)(set(args[0]))
    if method == "written":
        marks = trainer.written()
        return marks and {name: {"size": mark.size, "sha256": mark.sha256} for name, mark in marks.items()}
    if method == "fingerprint":
        return await trainer.fingerprint()
    if method == "verify":
        return await trainer.verify(args[0])
    return await trainer.publish(*args)


def _answer(sock: socket.socket, work: Any) -> Any:
    try:
        value = work()
    except SlimeError as error:
        send_blocking(sock, {"error": error.as_dict(), "kind": type(error).__name__, "trace": traceback.format_exc()})
        return None
    except Exception as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[-FRAMES:]).rstrip()
        parts = TrainerError(f"{type(error).__name__}: {error}", why=frames).as_dict()
        send_blocking(sock, {"error": parts, "kind": "TrainerError", "trace": traceback.format_exc()})
        return None
    send_blocking(sock, {"value": value})
    return value


if __name__ == "__main__":
    main()
