"""A run's parts on a Ray cluster: trainer ranks and engines in processes of their own, wherever there is room.

    driver: loop, collector, ledger, plugins --- hosts (actors) --- ranks, engines, SGLang servers (processes)

The driver needs no GPU. All machines see the run directory; ranks of one meet in a file there, those of several at a
port of the first. SGLang's servers are started before the ranks, which then find the memory that they leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from slime_core.backends import EngineStart, Served
from slime_core.clusters.debug import AbsentEngine, IdleTrainer
from slime_core.clusters.embedded import open_folder
from slime_core.clusters.engine_process import EngineProcess, Sender
from slime_core.clusters.engine_set import as_one, holding
from slime_core.clusters.hangs import Servers, Watch, watching
from slime_core.clusters.local import teacher_engine, teacher_of
from slime_core.clusters.ranks import RankTrainer
from slime_core.clusters.turns import FreeTurns, Resync, gives_memory, server_turns
from slime_core.ledger.ledger import SqliteLedger
from slime_core.plugins.backends import engine_of
from slime_core.protocols import Parts
from slime_core.threads import TorchThread
from slime_ray.head import head_kept
from slime_ray.joining import Hosts, head, hosts, joined
from slime_ray.placement import Plan, plan
from slime_ray.servers import RaySites
from slime_ray.travelling import check_travelling

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Engine
    from slime_core.report import Report
    from slime_core.weights.folder import ModelFolder


@asynccontextmanager
async def ray_cluster(config: Config, plugins: Plugins, report: Report) -> AsyncIterator[Parts]:
    """Join the cluster, place and start everything; give it all back at the end, whatever happened.

    Raises:
        ConfigError: CFG17 no cluster, CFG18 no room in it, CFG19 a wheel that does not fit.
        EngineError, TrainerError: a process that does not come up, with the end of its log.
    """
    run_dir, epoch, cluster = report.run_dir.path, report.run_dir.epoch, config.cluster
    folder = open_folder(config)
    for notice in folder.notices:
        report.note(notice)
    for text in check_travelling(config, plugins):
        report.note(text)
    placed = plan(config)
    async with watching(config, report) as watch, AsyncExitStack() as stack:
        name = stack.enter_context(joined(config, placed))
        await stack.enter_async_context(head_kept(head()))
        found = await stack.enter_async_context(hosts(config, placed))
        for text in _told(name, placed, found):
            report.note(text)
        thread = TorchThread(cluster.cpu_threads)
        stack.callback(thread.close)
        absent = config.rollout.debug_train_only
        start = None if absent else engine_of(config).start
        ranks = _trainer(config, plugins, placed, found, run_dir, epoch)
        engines = [] if start is not None else _engines(config, placed, found, run_dir, epoch, thread, stack)
        processes: list[RankTrainer | EngineProcess] = [*ranks, *engines]
        watch.add(found)
        for part in processes:
            watch.add(part)
        served = await stack.enter_async_context(_served(start, config, folder, report, watch, placed, found))
        await _all(stack, *processes)
        engine: Any = AbsentEngine() if absent else served.engine if served is not None else as_one(engines)
        roles: dict[str, Engine] = served.roles if served is not None else {}
        trainer: Any = ranks[0] if ranks else IdleTrainer(config, folder, thread, device="cpu", epoch=epoch)
        turns: Any = FreeTurns() if absent else server_turns(config, engine, trainer)
        if served is not None:
            turns = Resync(turns, trainer, engine)
            served.resync(turns.source)
        if (teacher := teacher_of(config)) and not absent and "teacher" not in roles:
            roles["teacher"] = await stack.enter_async_context(teacher_engine(config, teacher, folder, thread))
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


@asynccontextmanager
async def _served(
    start: Callable[[EngineStart], AbstractAsyncContextManager[Served]] | None,
    config: Config,
    folder: ModelFolder,
    report: Report,
    watch: Watch,
    placed: Plan,
    found: Hosts,
) -> AsyncIterator[Served | None]:
    """Servers, those of ours each in its seat; None where embedded engines serve.

    Servers that share the ranks' GPUs have given their memory back.
    """
    if start is None:
        yield None
        return
    sites, run_dir = RaySites(config, placed, found), report.run_dir
    if not placed.ranks and config.rollout.update_weight_transport == "auto":  # the driver sends them, without a GPU
        rollout = config.rollout.model_copy(update={"update_weight_transport": "disk"})
        config = config.model_copy(update={"rollout": rollout})
    begin = EngineStart(
        config=config, folder=folder, run_dir=run_dir.path, epoch=run_dir.epoch, note=report.note, sites=sites
    )
    async with start(begin) as served:
        watch.add(Servers(served.processes))
        if gives_memory(config, served.engine):
            await served.engine.pause("retract")
            await served.engine.release({"kv", "weights"})
        if placed.engines and not found.alone:
            report.note("servers listen on their machines' addresses: tokens and rollouts travel in clear text there")
        yield served


def _trainer(
    config: Config, plugins: Plugins, placed: Plan, found: Hosts, run_dir: Path, epoch: int
) -> list[RankTrainer]:
    """The ranks, each in its seat; none where nothing trains."""
    if not placed.ranks:
        return []
    several = len({seat.bundle for seat in placed.ranks}) > 1
    ranks = RankTrainer(
        config,
        plugins,
        world=len(placed.ranks),
        run_dir=run_dir,
        epoch=epoch,
        start=lambda number, child: found.start(placed.ranks[number], child),
        address=found.machines[0].address if several else "",
    )
    return [ranks]


def _engines(
    config: Config, placed: Plan, found: Hosts, run_dir: Path, epoch: int, thread: TorchThread, stack: AsyncExitStack
) -> list[EngineProcess]:
    """Embedded engines, each in its seat."""
    sender = Sender(thread)
    stack.callback(sender.close)
    return [
        EngineProcess(
            config,
            run_dir=run_dir,
            epoch=epoch,
            thread=thread,
            number=number,
            start=lambda number, child: found.start(placed.engines[number], child),
            sender=sender,
        )
        for number in range(len(placed.engines))
    ]


async def _all(stack: AsyncExitStack, *parts: RankTrainer | EngineProcess) -> None:
    """Start them side by side; the first that fails ends the start of the others."""
    starts = [asyncio.ensure_future(stack.enter_async_context(part)) for part in parts]
    try:
        await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        raise


def _told(name: str, placed: Plan, found: Hosts) -> list[str]:
    """Where everything lives; SGLang's servers are engines too."""
    names = [machine.name for machine in found.machines]
    where = [f"{name}: {len(placed.ranks)} trainer rank(s), {len(placed.engines)} engine(s)"]
    for number, machine in enumerate(names):
        ranks = [str(i) for i, seat in enumerate(placed.ranks) if seat.bundle == number]
        engines = [str(i) for i, seat in enumerate(placed.engines) if seat.bundle == number]
        parts = [f"rank {', '.join(ranks)}"] * bool(ranks) + [f"engine {', '.join(engines)}"] * bool(engines)
        where.append(f"on {machine}: {'; '.join(parts) or 'nothing'}")
    return where
