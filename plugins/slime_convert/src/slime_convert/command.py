"""`slime convert`: the FSDP trainer's checkpoints, adapters and GGUF files, and the words of other trainers."""

from __future__ import annotations

import copy
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

from slime_core.backends import TrainerBackend
from slime_core.plugins import available, backends
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_convert.folder_writing import Done, How

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
FOLDER = click.Path(path_type=Path)
CONVERTERS = dict.fromkeys(("hf-to-dist", "dist-to-hf", "dist-to-adapter"), "megatron")
"""Words of `slime convert` that trainers of slime's own repository bring."""


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
            size = int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a size; write 5GB, 512MiB or a number of bytes", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is not a size above 0", param, ctx)
        return size


def with_flags(word: str, command: click.Command) -> click.Command:
    """The command with the flags that all words share, and max-shard-size where it writes a model folder.

    Its function returns ``work(how)``, which is done as those flags say.
    """
    flags: list[click.Parameter] = [
        click.Option(["--dtype"], type=click.Choice(["keep", "bfloat16", "float32", "float16"]), default="keep",
                     show_default=True, help="Of floating-point tensors in DST."),
        click.Option(["--workers"], type=click.IntRange(1, 256), default=min(8, max(2, os.cpu_count() or 1)),
                     show_default=True, help="Files made at once."),
        click.Option(["--verify"], is_flag=True, help="Read everything back and compare it, bit for bit."),
        click.Option(["--force"], is_flag=True, help="Replace DST, once the new one is complete."),
        click.Option(["--quiet"], is_flag=True, help="No progress."),
        click.Option(["--json", "as_json"], is_flag=True, help="The answer as JSON."),
    ]  # fmt: skip
    if word.endswith("-to-hf"):
        flags.append(
            click.Option(["--max-shard-size", "shard"], type=Size(), default="2GiB", show_default=True,
                         help="Bytes of tensors in a file of DST.")
        )  # fmt: skip
    names = {param.name for param in command.params}
    added = [flag for flag in flags if flag.name not in names]

    def run(**values: Any) -> None:
        shared = {str(flag.name): values.pop(str(flag.name)) for flag in added}
        work = command.callback(**values) if command.callback is not None else None
        if work is not None:
            convert(shared, work)

    both = copy.copy(command)
    both.params, both.callback = [*command.params, *added], run
    return both


def converters() -> dict[str, click.Command]:
    """Words of `slime convert` that installed trainers bring; none of a plugin that does not load."""
    return {
        word: command
        for info in available()
        for backend in backends.brought_by(info.name)
        if isinstance(backend, TrainerBackend) and backend.converters
        for word, command in backend.converters().items()
    }


def converter(word: str) -> click.Command | None:
    """The command of a word of `slime convert`; None if no installed trainer has it.

    Raises:
        ConfigError: CFG04 its package is not installed.
        PluginError: PLG50 to PLG57 that package does not load.
    """
    name = CONVERTERS.get(word)
    if name is None:
        return converters().get(word)
    if not backends.is_installed(name):
        raise backends.absent(f"slime convert {word}", name, f"command line: slime convert {word}")
    backend = backends.named("slime_trainer", name, (), TrainerBackend)
    return backend.converters()[word] if backend.converters else None


class TrainerCommands(click.Group):
    """The built-in words, then those of installed trainers, which are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, for the help."""
        return sorted({*self.commands, *converters()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Find the one that was named."""
        command = self.commands.get(name) or converter(name)
        return with_flags(name, command) if command is not None else None


@click.group("convert", epilog="Example: slime convert gguf-to-hf model.gguf ./model", cls=TrainerCommands)
def command() -> None:
    """Convert checkpoints, tensor by tensor, whatever their size (docs/conversion.md).

    An interrupted conversion continues when the same command is run again; DST appears when complete.
    """


def checkpoint_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """CHECKPOINT, DST, and what a checkpoint of the FSDP trainer may not say."""
    origin = (
        "Folder that config, tokenizer and the base of adapters come from; default: the run's rollout.hf_checkpoint."
    )
    function = adapter_name(function)
    function = click.option("--origin-hf-dir", "origin", help=origin)(function)
    function = click.argument("target", metavar="DST", type=FOLDER)(function)
    return click.argument("checkpoint", metavar="CHECKPOINT", type=FOLDER)(function)


def adapter_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which adapter of a checkpoint."""
    return click.option("--adapter", default="", help="Which of several adapters.")(function)


def base_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """What an adapter is merged into."""
    choice = click.Choice(["auto", "fp8", "nf4"])
    text = "Merge into the base's floats (auto), or as they are in 4 or 8 bits; default: as the adapter was trained."
    return click.option("--base-weights", "form", type=choice, help=text)(function)


@command.command("fsdp-to-hf", epilog="Example: slime convert fsdp-to-hf runs/demo-0 ./model")
@checkpoint_arguments
@base_weights
def fsdp_to_hf_command(
    checkpoint: Path, target: Path, origin: str | None, adapter: str, form: str | None
) -> Callable[[How], Done]:
    """A checkpoint of the FSDP trainer (checkpoints/step-N, or a run directory) to a Hugging Face folder DST.

    Of adapters: their base with one of them merged.
    """
    from slime_convert.fsdp_to_hf import fsdp_to_hf
    from slime_core.weights.folder import resolve

    folder = resolve(origin, "--origin-hf-dir") if origin else None
    return lambda how: fsdp_to_hf(checkpoint, target, folder, how, adapter, form or "")


@command.command("fsdp-to-adapter", epilog="Example: slime convert fsdp-to-adapter runs/demo-0 ./adapter")
@checkpoint_arguments
def fsdp_to_adapter_command(checkpoint: Path, target: Path, origin: str | None, adapter: str) -> Callable[[How], Done]:
    """One adapter of a checkpoint of the FSDP trainer to an adapter folder DST in peft's format."""
    from slime_convert.fsdp_to_hf import fsdp_to_adapter
    from slime_core.weights.folder import resolve

    folder = resolve(origin, "--origin-hf-dir") if origin else None
    return lambda how: fsdp_to_adapter(checkpoint, target, folder, how, adapter)


@command.command("adapter-to-hf", epilog="Example: slime convert adapter-to-hf runs/demo-0/final/adapter ./model")
@click.argument("adapter", metavar="ADAPTER", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@click.option("--origin-hf-dir", "origin", help="Folder of the base model; default: the one that ADAPTER names.")
@base_weights
def adapter_to_hf_command(adapter: Path, target: Path, origin: str | None, form: str | None) -> Callable[[How], Done]:
    """An adapter folder in peft's format, merged into its base model, to a Hugging Face folder DST."""
    from slime_convert.adapter_to_hf import adapter_to_hf
    from slime_core.weights.folder import resolve

    folder = resolve(origin, "--origin-hf-dir") if origin else None
    return lambda how: adapter_to_hf(adapter, target, folder, how, form or "")


@command.command("gguf-to-hf", epilog="Example: slime convert gguf-to-hf model.gguf ./model")
@click.argument("source", metavar="FILE.gguf", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32", "float16"]), default="bfloat16", show_default=True,
              help="Of weights in DST.")  # fmt: skip
def gguf_to_hf_command(source: Path, target: Path, dtype: str) -> Callable[[How], Done]:
    """A GGUF file, dequantised, to a Hugging Face folder DST with tokenizer and chat template."""
    import torch

    from slime_convert.gguf_to_hf import gguf_to_hf

    return lambda how: gguf_to_hf(source, target, getattr(torch, dtype), how)


def convert(values: dict[str, Any], work: Callable[[How], Done]) -> None:
    """Do ``work`` as the shared flags say, with one torch thread and a progress bar; print the result."""
    import torch

    from slime_convert.folder_writing import How

    quiet, as_json = values.pop("quiet", False), values.pop("as_json", False)
    torch.set_num_threads(1)  # files are written in parallel instead
    began = time.monotonic()
    with progress(quiet) as (total, moved):
        done = work(How(**values, total=total, moved=moved, note=say))
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
