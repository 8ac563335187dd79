"""Repeat a recorded step outside the run, and compare it with the record, sample by sample.

    nearest checkpoint before it, else the starting weights -> recorded steps up to it, by `loop.train_on` -> compare

No engine is started. Nothing of the run directory is changed and no lock is taken, so the run may be going on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slime_cli.replaying.compare import BOOKKEEPING
from slime_core.checkpoint import LoadedCheckpoint, manifest
from slime_core.clusters import build_cluster
from slime_core.clusters.machine import machine_facts
from slime_core.config.load import stage_name, stages
from slime_core.context import Context
from slime_core.errors import ConfigError, StorageError
from slime_core.loop import train_on
from slime_core.report import Report, history
from slime_core.report.metrics import rollout_metrics
from slime_core.report.recorded import Recorded, Step, groups_of, open_recorded
from slime_core.report.rundir import RunDir
from slime_core.report.step_clock import StepClock
from slime_core.report.verification import Verification
from slime_core.rollout.groups import OpenGroups
from slime_core.rollout.staleness import Staleness
from slime_core.seeds import set_generators
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents, Trainer
    from slime_core.types import Batch

WORST = 10
"""Tokens that are shown: where trainer and engine stand furthest apart."""
Note = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class SampleRow:
    """A sample's part in the step. Log-prob differences are trainer now minus rollout, over trained tokens."""

    id: str
    reward: float
    tokens: int  # of the response that train
    advantage: float | None  # mean over them
    advantage_min: float | None
    advantage_max: float | None
    log_prob_diff: float | None  # mean of the absolute difference
    log_prob_diff_max: float | None


@dataclass(slots=True, kw_only=True)
class TokenRow:
    """A token at which trainer and engine differ most."""

    sample: str
    place: int  # in the response
    token: int
    text: str
    trainer: float
    rollout: float


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What :func:`replay` found."""

    step: int
    stage: str
    began: int  # version from which steps were made again
    origin: str  # the checkpoint, or the starting weights
    compared: int = 0  # metrics that both have
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)  # that differ: recorded, now
    fingerprint: tuple[str, str] = ("", "")  # of the weights: recorded, now
    parted: list[int] = field(default_factory=list)  # steps on the way, and this one, that made other weights
    machine: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # what differs: recorded, now
    samples: list[SampleRow] = field(default_factory=list)
    worst: list[TokenRow] = field(default_factory=list)
    verified: dict[str, float] | None = None

    @property
    def identical(self) -> bool:
        """Every metric that both have and the weights' fingerprint, bit for bit, here and in all steps on the way."""
        return not self.metrics and not self.parted

    def as_dict(self) -> dict[str, Any]:
        """Stable keys, JSON-ready."""
        return {"identical": self.identical, **asdict(self)}


class WatchedTrainer:
    """A trainer whose last batch can be looked at, with the policy's log-probs in it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batch: Batch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        self.batch = batch
        if "policy" not in batch.columns:
            scored = await self._trainer.score(batch, frozenset({"policy"}))
            self.batch = replace(batch, columns={**batch.columns, "policy": scored["policy"]["log_probs"]})
        return await self._trainer.step(batch)


async def replay(
    run_dir: RunDir, step: int, config: Config, plugins: Plugins, scratch: Path, *, verify: bool = False, note: Note
) -> Replayed:
    """Repeat ``step`` of a run in the empty folder ``scratch``, and compare it with the record.

    ``config`` is the run's own, with a device that is here. With ``verify`` its gradient is recomputed slowly, too.

    Raises:
        ConfigError: CFG03 the run has not trained such a step.
        StorageError: STO111 payloads that are needed were pruned, STO112 a damaged file.
        SlimeError: whatever a plugin or the trainer ran into.
    """
    with open_recorded(run_dir) as recorded, RunDir.create("replay", at=scratch / "run") as copy:
        steps = recorded.steps()
        _require_step(run_dir, step, steps)
        checkpoint = nearest(run_dir.checkpoints, step - 1, note)
        began = checkpoint.version if checkpoint else 0
        _require_payloads(recorded, steps, began, step)
        answer = Replayed(
            step=step,
            stage=steps[step].stage,
            began=began,
            origin=str(checkpoint.path) if checkpoint else "the starting weights",
            machine=_machine(run_dir, checkpoint, config),
        )
        alone = config.rollout.model_copy(update={"debug_train_only": True, "save_debug_rollout_data": ""})
        local = config.report.model_copy(update={"ledger_dir": ""})
        train = config.train.model_copy(update={"lora_load": ""}) if checkpoint is not None else config.train
        quiet = config.model_copy(update={"rollout": alone, "report": local, "train": train})
        async with build_cluster(quiet, plugins, Report(copy, quiet)) as components:
            await _Making(recorded, steps, quiet, plugins, components, copy.path, note, verify).run(answer, checkpoint)
        _compare_metrics(run_dir, answer)
    return answer


class _Making:
    """Repeat the steps up to the requested one."""

    def __init__(
        self,
        recorded: Recorded,
        steps: Mapping[int, Step],
        config: Config,
        plugins: Plugins,
        components: RunComponents,
        folder: Path,
        note: Note,
        verify: bool,
    ) -> None:
        self._recorded, self._steps, self._config, self._plugins = recorded, steps, config, plugins
        self._watched = WatchedTrainer(components.trainer)
        self._components = replace(components, trainer=cast("Trainer", self._watched))
        self._folder, self._note, self._verify = folder, note, verify

    async def run(self, answer: Replayed, checkpoint: LoadedCheckpoint | None) -> None:
        """Begin where ``checkpoint`` left the run, and fill ``answer``."""
        if checkpoint is not None:
            self._plugins.load_state(checkpoint.state["plugins"])
            set_generators(checkpoint.random)
        past = 0
        for index, stage in enumerate(stages(self._config)):
            first, past = past, past + stage.rollout.num_rollout
            if first >= answer.step or (checkpoint is not None and index < checkpoint.state["stage"]):
                continue
            await self._components.trainer.begin(stage)
            if checkpoint is not None and index == checkpoint.state["stage"]:
                await self._components.trainer.restore(checkpoint.trainer)
            for version in range(max(first, answer.began) + 1, min(past, answer.step) + 1):
                await self._make(version, stage, answer)

    async def _make(self, version: int, stage: Config, answer: Replayed) -> None:
        last = version == answer.step
        members = self._recorded.members(version)
        groups = groups_of(members, self._recorded.samples(members))
        staleness = Staleness(stage, OpenGroups())
        staleness.step(groups, version - 1)  # mask again what was too stale to train then
        for group in groups:
            self._plugins.note_group(group, stage)
        await self._components.ledger.issue(groups)
        for group in groups:
            await self._components.ledger.finish(group)
        ctx = Context(
            config=stage,
            engine=self._components.engines,
            tokenizer=self._components.tokenizer,
            run_dir=self._folder,
            version=version - 1,
            stage=stage_name(stage),
        )
        verification = Verification(answer.step if self._verify else 0, self._keep(answer))
        metrics = await train_on(groups, version - 1, self._components, self._plugins, ctx, StepClock(), verification)
        computed, recorded = await self._components.trainer.fingerprint(), self._steps[version].fingerprint
        if recorded and recorded != computed:
            answer.parted.append(version)
        self._note(f"step {version}: " + ("other weights" if version in answer.parted else "done"))
        if last:
            answer.fingerprint = (recorded, computed)
            rollout = rollout_metrics(groups, version - 1, {}, 0, stage.train.lora_adapters)
            computed_metrics = metrics | rollout | staleness.pop_metrics()
            answer.metrics = {name: (None, value) for name, value in computed_metrics.items()}
            self._look(groups, answer)

    def _keep(self, answer: Replayed) -> Callable[[dict[str, float]], dict[str, float]]:
        def keep(metrics: dict[str, float]) -> dict[str, float]:
            answer.verified = metrics
            return {}

        return keep

    def _look(self, groups: list[Group], answer: Replayed) -> None:
        """Rows of samples and tokens from the batch that was trained."""
        batch = self._watched.batch
        assert batch is not None
        trained = batch.loss_mask > 0
        gap, compared = np.zeros(len(trained)), False
        if "policy" in batch.columns and "rollout_log_probs" in batch.columns:
            compared = stage_draws(self._config, answer.stage)
            gap = np.asarray(batch.columns["policy"], np.float64) - batch.columns["rollout_log_probs"]
        advantages = batch.columns.get("advantages")
        for i, name in enumerate(batch.sample_ids):
            place = slice(int(batch.response_offsets[i]), int(batch.response_offsets[i + 1]))
            trained_tokens = trained[place]
            parts = advantages[place][trained_tokens].astype(np.float64) if advantages is not None else np.zeros(0)
            apart = np.abs(gap[place][trained_tokens]) if compared else np.zeros(0)
            answer.samples.append(
                SampleRow(
                    id=name,
                    reward=float(batch.reward[i]),
                    tokens=int(trained_tokens.sum()),
                    advantage=_of(parts, np.mean),
                    advantage_min=_of(parts, np.min),
                    advantage_max=_of(parts, np.max),
                    log_prob_diff=_of(apart, np.mean),
                    log_prob_diff_max=_of(apart, np.max),
                )
            )
        if compared:
            answer.worst = _worst(batch, np.where(trained, np.abs(gap), -1.0), self._components.tokenizer)


def stage_draws(config: Config, stage: str) -> bool:
    """Whether an engine drew the tokens of a stage, so that log-probs can be compared."""
    named = {stage_name(part): part for part in stages(config)}
    return stage not in named or not named[stage].train.offline


def nearest(folder: Path, version: int, note: Note) -> LoadedCheckpoint | None:
    """The newest whole checkpoint at or before ``version``; nothing is renamed or removed."""
    for number, path in manifest.names_in(folder):
        if number <= version:
            try:
                return manifest.read(path, number)
            except StorageError as error:
                note(f"checkpoint {path.name} is left out: {error.what}")
    return None


def _require_step(run_dir: RunDir, step: int, steps: Mapping[int, Step]) -> None:
    trained = [version for version, recorded in steps.items() if recorded.trained]
    if step in trained:
        return
    have = f"it trained steps {min(trained)} to {max(trained)}" if trained else "it trained no step"
    raise ConfigError(
        f"the run has not trained step {step}",
        code="CFG03",
        where=f"--step {step}",
        why=have + (f"; step {step} is journaled, and the run ended in it" if step in steps else ""),
        fix=f"--step {max(trained)}" if trained else f"slime show {run_dir.path}",
    )


def _require_payloads(recorded: Recorded, steps: Mapping[int, Step], began: int, step: int) -> None:
    for version in range(began + 1, step + 1):
        members = recorded.members(version)
        if version not in steps or any(member.place is None for member in members):
            raise StorageError(
                f"step {step} cannot be replayed: the samples of step {version} no longer have their payload",
                code="STO111",
                where=str(recorded.path),
                why=f"steps {began + 1} to {step} would be replayed, but report.ledger_keep_steps pruned some of them",
                fix="choose a later step, or run with --ledger-keep-steps 0",
            )


def _machine(run_dir: RunDir, checkpoint: LoadedCheckpoint | None, config: Config) -> dict[str, tuple[Any, Any]]:
    now = machine_facts(config)
    recorded = checkpoint.machine if checkpoint else run_dir.read_info().get("machine") or now
    return {key: (recorded.get(key), now.get(key)) for key in {**recorded, **now} if recorded.get(key) != now.get(key)}


def _compare_metrics(run_dir: RunDir, answer: Replayed) -> None:
    """Turn ``metrics``, all that were made, into those that differ from the recorded ones."""
    rows = {row["version"]: row["metrics"] for row in history.steps_of(run_dir)}
    recorded = rows.get(answer.step, {})
    both = {
        name: (recorded[name], _finite(value))
        for name, (_, value) in sorted(answer.metrics.items())
        if name in recorded and not name.startswith(BOOKKEEPING)
    }
    answer.compared = len(both)
    answer.metrics = {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _worst(batch: Batch, apart: Any, tokenizer: Any) -> list[TokenRow]:
    order = [int(i) for i in np.argsort(-apart, kind="stable")[:WORST] if apart[i] >= 0]
    of_token, rows = batch.sample_of_token(), []
    for i in order:
        sample = int(of_token[i])
        place = i - int(batch.response_offsets[sample])
        begin = int(batch.offsets[sample + 1]) - int(batch.response_lengths[sample])
        token = int(batch.tokens[begin + place])
        rows.append(
            TokenRow(
                sample=batch.sample_ids[sample],
                place=place,
                token=token,
                text=str(tokenizer.decode([token])),
                trainer=float(batch.columns["policy"][i]),
                rollout=float(batch.columns["rollout_log_probs"][i]),
            )
        )
    return rows


def _of(values: Any, fn: Callable[[Any], Any]) -> float | None:
    return float(fn(values)) if values.size else None


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
