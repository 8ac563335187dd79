"""This machine as a cluster: an engine and an FSDP2 trainer, in this process or in processes of their own.

On-policy the embedded engine shares the trainer's process and takes turns with it. Where a stage runs ahead
(``max_staleness`` above 0) or evaluates beside training it has its own process, or `rollout_num_engines` of them, and
generates while the trainer trains. Servers are started
before the trainer, which then finds the memory that they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from slime_core.backends import EngineStart
from slime_core.clusters.debug import AbsentEngine, IdleTrainer
from slime_core.clusters.embedded import context_len, embedded_engine, open_folder
from slime_core.clusters.engine_process import EngineProcess
from slime_core.clusters.engine_set import as_one, holding
from slime_core.clusters.hangs import Servers, Watch, watching
from slime_core.clusters.machine import engines_apart
from slime_core.clusters.ranks import RankTrainer
from slime_core.clusters.turns import FreeTurns, QuietTurns, Resync, gives_memory, server_turns
from slime_core.config.load import stages
from slime_core.errors import ConfigError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.notices import notice
from slime_core.plugins.backends import engine_of, trainer_of
from slime_core.protocols import Parts, Serving
from slime_core.threads import TorchThread
from slime_core.trainers.checks import open_model
from slime_core.types import WeightUpdate

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.engines.local import LocalEngine
    from slime_core.plugins import Plugins
    from slime_core.protocols import Engine, Trainer
    from slime_core.report import Report
    from slime_core.weights.folder import ModelFolder


@asynccontextmanager
async def local_cluster(config: Config, plugins: Plugins, report: Report) -> AsyncIterator[Parts]:
    """Start everything on this machine; take it down at the end, whatever happened."""
    run_dir, epoch = report.run_dir.path, report.run_dir.epoch
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    folder = open_folder(config)
    for text in folder.notices:
        report.note(text)
    cluster, dtype = config.cluster, config.train.dtype
    report.note(f"{cluster.device}, {dtype}, {cluster.cpu_threads} threads, {world} trainer rank(s)")
    async with watching(config, report) as watch, AsyncExitStack() as stack:
        thread = TorchThread(config.cluster.cpu_threads)
        stack.callback(thread.close)
        engine: Any = None
        roles: dict[str, Engine] = {}
        absent = config.rollout.debug_train_only
        backend = engine_of(config)
        if backend.start is not None and not absent:
            start = EngineStart(config=config, folder=folder, run_dir=run_dir, epoch=epoch, note=report.note)
            served = await stack.enter_async_context(backend.start(start))
            engine, roles = served.engine, served.roles
            watch.add(Servers(served.processes))
            if gives_memory(config, engine):
                await engine.pause("retract")
                await engine.release({"kv", "weights"})
        trainer = await _trainer(config, plugins, report, folder, thread, stack, watch)
        turns: Any
        if engine is not None:
            turns = Resync(server_turns(config, engine, trainer), trainer, engine)
            served.resync(turns.source)
        elif absent:
            engine, turns = AbsentEngine(), FreeTurns()
        elif count := engines_apart(config):
            made = [EngineProcess(config, run_dir=run_dir, epoch=epoch, thread=thread, number=i) for i in range(count)]
            for apart in made:
                watch.add(apart)
                await stack.enter_async_context(apart)
                report.note(
                    f"engine {apart.number} has a process of its own, {apart.pid}: it generates beside training"
                )
            engine, turns = as_one(made), FreeTurns()
        else:
            engine = await stack.enter_async_context(embedded_engine(config, folder, thread, epoch=epoch))
            turns = QuietTurns(engine)
        if (teacher := teacher_of(config)) and not absent and "teacher" not in roles:
            roles["teacher"] = await stack.enter_async_context(teacher_engine(config, teacher, folder, thread))
            report.note(f"the teacher {teacher} is an engine of its own, at temperature 1")
        ledger = watch.ledger = SqliteLedger(run_dir, config.report.ledger_dir)
        stack.push_async_callback(ledger.close)
        yield Parts(
            engines=engine,
            tokenizer=folder.tokenizer(),
            vocab_size=folder.vocab_size,
            roles=roles,
            trainer=trainer,
            ledger=ledger,
            turns=turns,
            hold=holding(engine),
        )


async def _trainer(
    config: Config,
    plugins: Plugins,
    report: Report,
    folder: ModelFolder,
    thread: TorchThread,
    stack: AsyncExitStack,
    watch: Watch,
) -> Trainer:
    """In this process where there is one rank, else ranks in processes of their own."""
    run_dir, epoch = report.run_dir.path, report.run_dir.epoch
    cluster = config.cluster
    world = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    if config.rollout.debug_rollout_only:
        return IdleTrainer(config, folder, thread, device=cluster.device, epoch=epoch)
    if world == 1:
        errors = run_dir / "errors"
        kind = trainer_of(config).trainer()
        trainer: Trainer = kind(
            config, plugins, folder, thread=thread, device=cluster.device, errors=errors, epoch=epoch
        )
        return trainer
    ranks = RankTrainer(
        config,
        plugins,
        world=world,
        run_dir=run_dir,
        epoch=epoch,
    )
    watch.add(ranks)
    return await stack.enter_async_context(ranks)


@asynccontextmanager
async def local_serving(config: Config) -> AsyncIterator[Serving]:
    """An engine alone, with the folder's weights."""
    folder = open_folder(config)
    async with AsyncExitStack() as stack:
        if (start := engine_of(config).start) is not None:
            run_dir = Path(stack.enter_context(TemporaryDirectory(prefix="slime-eval-")))
            served = await stack.enter_async_context(start(serving_start(config, folder, run_dir)))
            if folder.init_weights == "random":
                weights = {"folder": str(await asyncio.to_thread(_drawn, config, folder, run_dir / "drawn"))}
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
        model = await thread.run(folder.build_model, dtype="float32", seed=config.seed)
        await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(model.state_dict())))
        yield Serving(engines=engine, tokenizer=folder.tokenizer(), vocab_size=folder.vocab_size)


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


def _drawn(config: Config, folder: ModelFolder, path: Path) -> Path:
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
    found = list(dict.fromkeys(t.teacher_load for t in trains if t.teacher_load and t.teacher_place == "engine"))
    if len(found) > 1:
        raise ConfigError(
            f"stages name {len(found)} teachers with teacher_place = engine: {', '.join(found)}",
            code="CFG04",
            where="train.teacher_load",
            why="one teacher engine serves the whole run",
            fix="set teacher_place = trainer in all stages but one",
        )
    return found[0] if found else ""


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
