"""A run's parts, wherever a cluster has places for them; and this machine as a cluster.

    Places --assembled--> servers -> ranks and engines, side by side -> devices, ledger: `protocols.RunComponents`

On this machine, on-policy, the embedded engine shares the trainer's process and takes turns with it. Where a stage
runs ahead (``max_staleness`` above 0) or evaluates beside training it has its own process, or `rollout_num_engines` of
them, and generates while the trainer trains. Servers that give memory back start before the trainer, which then finds
it; others beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from slime_core.backends import EngineStart, ServedEngines
from slime_core.clusters.channel import Start, start_here
from slime_core.clusters.colocation import DedicatedDevices, Resync, TimeSharing, device_sharing, offloads_engine
from slime_core.clusters.debug import AbsentEngine, IdleTrainer
from slime_core.clusters.embedded import context_len, embedded_engine, notices, open_folder
from slime_core.clusters.engine_process import EngineProcess, FrameSender
from slime_core.clusters.engine_set import as_one, engine_reservation
from slime_core.clusters.hangs import Servers, Watched, watching
from slime_core.clusters.machine import engines_apart
from slime_core.clusters.ranks import RankTrainer
from slime_core.config.load import stages
from slime_core.errors import ConfigError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.lora.folder import BaseForm
from slime_core.lora.served import base_form, served_adapters
from slime_core.notices import notice
from slime_core.plugins.backends import cluster_of, engine_of, trainer_of
from slime_core.protocols import RunComponents, Serving
from slime_core.threads import TorchThread
from slime_core.trainers.adapters import AdapterTrainer
from slime_core.trainers.roles import open_model
from slime_core.types import WeightUpdate

if TYPE_CHECKING:
    from slime_core.clusters.host import ServerPlacements
    from slime_core.config.schema import Config
    from slime_core.engines.local import LocalEngine
    from slime_core.plugins import Plugins
    from slime_core.protocols import Engine, Trainer
    from slime_core.report import Report
    from slime_core.weights.folder import ModelFolder


@dataclass(slots=True, frozen=True, kw_only=True)
class Places:
    """Where a cluster has room for a run's parts, those of this machine by default.

    Example: Places(ranks=4, engines=2, start_rank=start, start_engine=start, rendezvous="10.0.0.5")
    """

    ranks: int = 0  # processes; 0: the trainer lives in this one
    engines: int = 0  # processes of embedded engines; 0: one lives in this process
    start_rank: Start = start_here
    start_engine: Start | None = None  # None: on this machine, with weights in shared memory
    rendezvous: str = ""  # address of rank 0, where ranks are on several machines
    placements: ServerPlacements | None = None  # of servers
    watched: Sequence[Watched] = ()  # what may hang beside ranks, engines and servers


@asynccontextmanager
async def assembled(
    config: Config, plugins: Plugins, report: Report, place: Callable[[AsyncExitStack], Awaitable[Places]]
) -> AsyncIterator[RunComponents]:
    """Start everything at the places that ``place`` finds; take it down at the end, whatever happened.

    Raises:
        EngineError, TrainerError: a process that does not come up, with the end of its log.
    """
    run_dir, epoch, cluster = report.run_dir.path, report.run_dir.epoch, config.cluster
    absent, start = config.rollout.debug_train_only, engine_of(config).start
    folder = open_folder(config)
    for text in notices(config, folder):
        report.note(text)
    async with watching(config, report) as watch, AsyncExitStack() as stack:
        places = await place(stack)
        thread = TorchThread(cluster.cpu_threads)
        stack.callback(thread.close)
        ranks = [
            RankTrainer(
                config,
                plugins,
                world=places.ranks,
                run_dir=run_dir,
                epoch=epoch,
                start=places.start_rank,
                address=places.rendezvous,
            )
        ] * bool(places.ranks)
        sender = None
        if places.start_engine is not None:
            sender = FrameSender(thread)
            stack.callback(sender.close)
        engines = [
            EngineProcess(
                config,
                run_dir=run_dir,
                epoch=epoch,
                thread=thread,
                number=number,
                start=places.start_engine,
                sender=sender,
            )
            for number in range(0 if absent or start is not None else places.engines)
        ]
        processes: list[RankTrainer | EngineProcess] = [*ranks, *engines]
        for part in (*places.watched, *processes):
            watch.add(part)
        served: ServedEngines | None = None

        async def start_servers() -> None:
            nonlocal served
            if start is not None and not absent:
                served = await stack.enter_async_context(_servers(config, start, folder, report, places))
                watch.add(Servers(served.processes))

        async def start_trainer() -> Trainer:
            await _side_by_side(*(stack.enter_async_context(part) for part in processes))
            return ranks[0] if ranks else await asyncio.to_thread(_trainer, config, plugins, report, folder, thread)

        if places.placements is not None or engine_of(config).gives_memory(config):  # which the trainer then finds
            await start_servers()
            trainer = await start_trainer()
        else:
            _, trainer = await _side_by_side(start_servers(), start_trainer())
        engine: Any
        devices: Any = DedicatedDevices()
        if absent:
            engine = AbsentEngine()  # type: ignore[abstract]  # a protocol's own bodies do nothing, as they are to
        elif served is not None:
            engine = served.engine
            devices = Resync(device_sharing(config, engine, trainer), trainer, engine)
            served.resync(devices.source)
        elif engines:
            engine = as_one(engines)
            if cluster_of(config).remote:
                devices = device_sharing(config, engine, trainer)
        else:
            engine = await stack.enter_async_context(
                embedded_engine(config, folder, thread, epoch=epoch, run_dir=run_dir)
            )
            devices = TimeSharing(engine)
        if places.start_engine is None:
            for apart in engines:
                report.note(
                    f"engine {apart.number} runs in its own process, {apart.pid}, and generates during training"
                )
        names = config.train.lora_adapters
        roles: dict[str, Engine] = served.roles if served is not None else {}
        if (teacher := teacher_of(config)) and not absent and "teacher" not in roles:
            roles["teacher"] = await stack.enter_async_context(teacher_engine(config, teacher, folder, thread))
            report.note(f"the teacher {teacher} runs as a separate engine, at temperature 1")
        ledger = watch.ledger = SqliteLedger(run_dir, config.report.ledger_dir)
        stack.push_async_callback(ledger.close)
        yield RunComponents(
            engines=engine,
            tokenizer=folder.tokenizer(),
            vocab_size=folder.vocab_size,
            context_len=context_len(config, folder),
            roles=roles,
            trainer=AdapterTrainer(trainer, names) if len(names) > 1 else trainer,
            ledger=ledger,
            devices=devices,
            reserve_engine=engine_reservation(engine),
        )


@asynccontextmanager
async def _servers(
    config: Config,
    start: Callable[[EngineStart], AbstractAsyncContextManager[ServedEngines]],
    folder: ModelFolder,
    report: Report,
    places: Places,
) -> AsyncIterator[ServedEngines]:
    """Servers; those that share the trainer's GPUs have given their memory back."""
    run_dir, rollout = report.run_dir, config.rollout
    if places.placements is not None and not places.ranks and rollout.update_weight_transport == "auto":
        rollout = rollout.model_copy(update={"update_weight_transport": "disk"})  # the driver sends, without a GPU
        config = config.model_copy(update={"rollout": rollout})
    begin = EngineStart(
        config=config,
        folder=folder,
        run_dir=run_dir.path,
        epoch=run_dir.epoch,
        note=report.note,
        placements=places.placements,
    )
    async with start(begin) as served:
        if offloads_engine(config, served.engine):
            await served.engine.pause("retract")
            await served.engine.release({"kv", "weights"})
        elif config.cluster.colocate and config.cluster.device == "cuda":
            report.note("servers and trainer keep their memory: the GPU has room for both")
        yield served


async def _side_by_side(*starts: Coroutine[Any, Any, Any]) -> list[Any]:
    """The answers of all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _trainer(config: Config, plugins: Plugins, report: Report, folder: ModelFolder, thread: TorchThread) -> Trainer:
    """In this process."""
    epoch, remote = report.run_dir.epoch, cluster_of(config).remote
    device = "cpu" if remote else config.cluster.device  # its GPUs are other machines'
    if config.rollout.debug_rollout_only:
        return IdleTrainer(config, folder, thread, device=device, epoch=epoch)  # type: ignore[abstract]
    errors = report.run_dir.path / "errors"
    kind = trainer_of(config).trainer()
    trainer: Trainer = kind(config, plugins, folder, thread=thread, device=device, errors=errors, epoch=epoch)
    return trainer


def local_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[RunComponents]:
    """Start everything on this machine; take it down at the end, whatever happened."""
    cluster = config.cluster
    world = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node

    async def place(_: AsyncExitStack) -> Places:
        threads = f"{cluster.cpu_threads} threads, {world} trainer rank(s)"
        report.note(f"{cluster.device}, {config.train.dtype}, {threads}")
        in_process = world == 1 or config.rollout.debug_rollout_only
        return Places(ranks=0 if in_process else world, engines=engines_apart(config))

    return assembled(config, plugins, report, place)


@asynccontextmanager
async def local_serving(config: Config) -> AsyncIterator[Serving]:
    """An engine alone, with the folder's weights, and the adapters of ``train.lora_load`` beside them.

    Raises:
        ConfigError: CFG04 adapters for an engine in processes of its own.
    """
    folder, adapters = open_folder(config), config.train.lora_load
    async with AsyncExitStack() as stack:
        if (start := engine_of(config).start) is not None:
            if adapters:
                raise _not_beside(config, adapters)
            run_dir = Path(stack.enter_context(TemporaryDirectory(prefix="slime-eval-")))
            served = await stack.enter_async_context(start(serving_start(config, folder, run_dir)))
            if folder.init_weights == "random":
                weights = {"folder": str(await asyncio.to_thread(_random_weights, config, folder, run_dir / "drawn"))}
                await served.engine.load(WeightUpdate(version=0, epoch=0, transport="disk", handle=weights))
            yield Serving(
                engines=served.engine,
                tokenizer=folder.tokenizer(),
                vocab_size=folder.vocab_size,
                roles=served.roles,
            )
            return
        thread = TorchThread(config.cluster.cpu_threads)
        stack.callback(thread.close)
        engine = await stack.enter_async_context(embedded_engine(config, folder, thread))
        names = config.train.lora_adapters
        form = base_form(Path(adapters), names) if adapters else BaseForm("auto")
        if not form.form:  # adapters of older runs and other programs do not say it
            form = BaseForm(config.train.base_weights, config.train.dtype)
        tensors = await thread.run(_weights, folder, config.seed, form)
        update = WeightUpdate(version=0, epoch=0, transport="tensors", tensors=tensors)
        if adapters:
            update.adapters = served_adapters(Path(adapters), names)
        await engine.load(update)
        yield Serving(engines=engine, tokenizer=folder.tokenizer(), vocab_size=folder.vocab_size)


def _weights(folder: ModelFolder, seed: int, form: BaseForm) -> dict[str, Any]:
    """A folder's weights as floats, with the values that they had in the few bits of ``form``."""
    import torch

    from slime_core.trainers.fsdp.adapters import rounded_on

    put = rounded_on(torch.device("cpu"), folder, form.form, floats=True)
    model: Any = folder.build_model(form.dtype or "float32", seed, put=put)
    return dict(model.state_dict())


def _not_beside(config: Config, adapters: str) -> ConfigError:
    return ConfigError(
        f"an adapter is evaluated by the embedded engine, not by rollout_engine = {config.rollout.rollout_engine}",
        code="CFG04",
        where=adapters,
        why="servers are started here with the weights of a model folder",
        fix=f"slime convert adapter-to-hf {adapters}{'/NAME' * (len(config.train.lora_adapters) > 1)} MODEL, "
        "then slime eval MODEL; or --rollout-engine local",
    )


def serving_start(config: Config, folder: ModelFolder, run_dir: Path) -> EngineStart:
    """What servers are started with for evaluation alone; logs go into a folder that is removed at the end."""
    return EngineStart(
        config=config,
        folder=folder,
        run_dir=run_dir,
        epoch=0,
        note=lambda text: notice(text, text),
        fixed=folder.init_weights != "random",
    )


def _random_weights(config: Config, folder: ModelFolder, path: Path) -> Path:
    """A folder of the weights that are drawn from the seed."""
    model: Any = folder.build_model("float32", seed=config.seed)
    model.save_pretrained(str(path))
    return path


def teacher_of(config: Config) -> str:
    """The model folder that an engine serves as teacher in any stage; empty where none does.

    Raises:
        ConfigError: CFG04 stages that name several.
    """
    trains = [stage.train for stage in stages(config)]
    teachers = list(dict.fromkeys(t.teacher_load for t in trains if t.teacher_load and t.teacher_place == "engine"))
    if len(teachers) > 1:
        raise ConfigError(
            f"stages name {len(teachers)} teachers with teacher_place = engine: {', '.join(teachers)}",
            code="CFG04",
            where="train.teacher_load",
            why="one teacher engine serves the whole run",
            fix="set teacher_place = trainer in all stages but one",
        )
    return teachers[0] if teachers else ""


@asynccontextmanager
async def teacher_engine(
    config: Config, path: str, policy: ModelFolder, thread: TorchThread
) -> AsyncIterator[LocalEngine]:
    """A frozen engine of another model that reads the policy's token ids; it only scores, so it has one slot."""
    folder = await thread.run(open_model, "train.teacher_load", path, policy)
    length = min(context_len(config, policy), folder.context_len)
    async with embedded_engine(config, folder, thread, slots=1, length=length) as engine:
        model = await thread.run(folder.build_model, dtype="float32")
        await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(model.state_dict())))
        yield engine
