"""What the words of `slime convert` share: flags, folders by name, progress, and the answer."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.weights.folder_writing import Done, How

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
FOLDER = click.Path(path_type=Path)


class Size(click.ParamType):
    """Bytes: `5GB`, `512MiB` or a number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Of the text, in bytes."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        number = text.rstrip("kKmMgGiIbB").strip()
        unit = text[len(number) :].strip().upper()
        try:
            found = int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is no size; write 5GB, 512MiB or a number of bytes", param, ctx)
        if found < 1:
            self.fail(f"{value!r} is no size above 0", param, ctx)
        return found


def options(*, to_hf: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Flags that the commands share."""
    cores = os.cpu_count() or 1
    flags = [
        click.option("--dtype", type=click.Choice(["keep", "bfloat16", "float32", "float16"]), default="keep",
                     show_default=True, help="Of floating-point tensors in DST."),
        click.option("--workers", type=click.IntRange(1, 256), default=min(8, max(2, cores)), show_default=True,
                     help="Files made at once."),
        click.option("--verify", is_flag=True, help="Read everything back and compare it, bit for bit."),
        click.option("--force", is_flag=True, help="Replace DST, once the new one is complete."),
        click.option("--quiet", is_flag=True, help="No progress."),
        click.option("--json", "as_json", is_flag=True, help="The answer as JSON."),
    ]  # fmt: skip
    if to_hf:
        flags.append(
            click.option("--max-shard-size", "shard", type=Size(), default="2GiB", show_default=True,
                         help="Bytes of tensors in a file of DST.")
        )  # fmt: skip

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for flag in reversed(flags):
            function = flag(function)
        return function

    return add


ORIGIN = click.option(
    "--origin-hf-dir",
    "origin",
    type=FOLDER,
    help="Folder that config and tokenizer come from; default: the run's rollout.hf_checkpoint.",
)


def folder_of(path: Path, named: str = "--origin-hf-dir") -> Path:
    """A folder, or the folder of a hub name; ``named`` is the word that names it."""
    from slime_core.weights.folder import resolve

    return resolve(path, named)


def convert(given: dict[str, Any], work: Callable[[How], Done]) -> None:
    """Do ``work`` as the flags of :func:`options` say, with one torch thread and a progress bar; print the result."""
    import torch

    from slime_core.weights.folder_writing import How

    quiet, as_json = given.pop("quiet"), given.pop("as_json")
    torch.set_num_threads(1)  # files are what is made in parallel
    began = time.monotonic()
    with progress(quiet) as (total, moved):
        done = work(How(**given, total=total, moved=moved, note=say))
    seconds = time.monotonic() - began
    if as_json:
        about = {name: getattr(done, name) for name in ("tensors", "files", "kept", "verified")}
        click.echo(
            json.dumps({"path": str(done.path), "bytes": done.size, "seconds": seconds, **about}, sort_keys=True)
        )
        return
    rate = done.size / 1e9 / max(seconds, 1e-9)
    checked = "; all compared" if done.verified else ""
    say(f"{done.tensors} tensors, {done.size / 1e9:.2f} GB in {seconds:.1f} s ({rate:.2f} GB/s){checked}")
    click.echo(str(done.path))


@contextmanager
def progress(quiet: bool) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Two functions, for all bytes and for those that are done: a bar on a terminal, elsewhere a line now and then."""
    if quiet:
        yield (lambda count: None), (lambda count: None)
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("converting", total=None)
            yield (lambda count: bar.update(task, total=count)), (lambda count: bar.advance(task, count))
        return
    state, lock, pause = {"total": 0, "done": 0, "said": 0}, threading.Lock(), 2.0
    last = [time.monotonic()]

    def moved(count: int) -> None:
        with lock:
            state["done"] += count
            tenth = 10 * state["done"] // max(1, state["total"])
            if state["said"] < tenth <= 10 and time.monotonic() - last[0] > pause:
                state["said"], last[0] = tenth, time.monotonic()
                say(f"{10 * tenth} % of {state['total'] / 1e9:.2f} GB")

    yield (lambda count: state.update(total=count)), moved
