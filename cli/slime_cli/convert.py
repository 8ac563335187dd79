"""`slime convert`: model folders to torch_dist checkpoints and back; the FSDP trainer's checkpoints to folders."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.weights.bridge import Bridge
    from slime_core.weights.conversion import Done, How

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


PLUGINS = click.option(
    "--plugin", "plugins", multiple=True, help="Whose bridges are asked; default: models, where it is installed."
)
ORIGIN = click.option(
    "--origin-hf-dir",
    "origin",
    type=FOLDER,
    help="Folder that config and tokenizer come from; default: the run's rollout.hf_checkpoint.",
)


@click.group("convert")
def command() -> None:
    """Convert checkpoints, tensor by tensor, whatever their size (docs/conversion.md).

    Interrupted conversions go on when the same command is given again; DST appears when it is complete.
    """


@command.command("hf-to-dist")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@click.option(
    "--make-vocab-size-divisible-by",
    "divisible_by",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Rows of the vocabulary are filled up with zeros to a multiple of it.",
)
@click.option(
    "--tensor-model-parallel-size",
    "tp",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Times the number before, as Megatron counts; any layout loads DST all the same.",
)
@PLUGINS
@options(to_hf=False)
def hf_to_dist_command(source: Path, target: Path, divisible_by: int, tp: int, **rest: Any) -> None:
    """A Hugging Face folder SRC to a Megatron checkpoint DST (torch_dist), for any layout."""
    from slime_core.weights.conversion import hf_to_dist

    find = finder(rest.pop("plugins"))
    convert(rest, lambda how: hf_to_dist(folder_of(source, "SRC"), target, find, how), divisible_by=divisible_by * tp)


@command.command("dist-to-hf")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@ORIGIN
@click.option(
    "--trust-metadata", "trusted", is_flag=True, help="Read the metadata of a checkpoint that slime did not write."
)
@PLUGINS
@options(to_hf=True)
def dist_to_hf_command(source: Path, target: Path, origin: Path | None, trusted: bool, **rest: Any) -> None:
    """A Megatron checkpoint SRC (torch_dist of any layout, or a run directory) to a Hugging Face folder DST."""
    from slime_core.weights.conversion import dist_to_hf
    from slime_core.weights.dist import find as folder_with_tensors
    from slime_core.weights.run_folder import origin_of, step_of

    find = finder(rest.pop("plugins"))

    def work(how: How) -> Done:
        from_ = folder_of(origin) if origin else origin_of(step_of(folder_with_tensors(source)))
        return dist_to_hf(source, target, from_, find, how)

    convert(rest, work, trusted=trusted)


@command.command("fsdp-to-hf")
@click.argument("checkpoint", metavar="CHECKPOINT", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@ORIGIN
@options(to_hf=True)
def fsdp_to_hf_command(checkpoint: Path, target: Path, origin: Path | None, **rest: Any) -> None:
    """A checkpoint of the FSDP trainer (checkpoints/step-N, or a run directory) to a Hugging Face folder DST."""
    from slime_core.trainers.fsdp.exporting import fsdp_to_hf

    convert(rest, lambda how: fsdp_to_hf(checkpoint, target, folder_of(origin) if origin else None, how))


def folder_of(path: Path, named: str = "--origin-hf-dir") -> Path:
    """A folder, or the folder of a hub name; ``named`` is the word that names it."""
    from slime_core.weights.folder import resolve

    return resolve(path, named)


def finder(names: tuple[str, ...]) -> Callable[[Any], Bridge]:
    """Asks the named plugins for the bridge of a config."""
    from slime_core.plugins.bridges import find_bridge
    from slime_core.plugins.discover import available
    from slime_core.plugins.load import load_plugin

    asked = names or tuple(plugin.name for plugin in available() if plugin.name == "models")
    loaded = [load_plugin(name) for name in dict.fromkeys(asked)]
    return lambda config: find_bridge(loaded, config)


def convert(given: dict[str, Any], work: Callable[[How], Done], **more: Any) -> None:
    """Do it with one torch thread and a progress bar, and say what was made."""
    import torch

    from slime_core.weights.conversion import How

    quiet, as_json = given.pop("quiet"), given.pop("as_json")
    torch.set_num_threads(1)  # files are what is made in parallel
    began = time.monotonic()
    with progress(quiet) as (total, moved):
        done = work(How(**given, **more, total=total, moved=moved, note=say))
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
    import sys
    import threading

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
