"""The embedded engine that a config asks for, for whichever process it is to live in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.stages import rollout_slots
from slime_core.data.chat import raw_prompt_notices
from slime_core.engines.local import LocalEngine
from slime_core.engines.local.slots import SHARE, SHARE_ALONE
from slime_core.lora.folder import start_notices
from slime_core.peaks import PhasePeaks
from slime_core.profile import StepProfile
from slime_core.weights.folder import ModelFolder

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.threads import TorchThread


def open_folder(config: Config) -> ModelFolder:
    """The model folder of a run."""
    rollout = config.rollout
    return ModelFolder.open(
        rollout.hf_checkpoint,
        trust_remote_code=rollout.trust_remote_code,
        init_weights=rollout.init_weights,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


def notices(config: Config, folder: ModelFolder) -> list[str]:
    """What is unusual about a run's model, its adapters and how its prompts are read: sentences for people."""
    raw = [] if config.data.apply_chat_template else raw_prompt_notices(folder.tokenizer())
    return [*folder.notices, *raw, *start_notices(config.train)]


def context_len(config: Config, folder: ModelFolder) -> int:
    """Tokens of a prompt and its response: the config's bound, or the model's own."""
    return config.rollout.rollout_max_context_len or folder.context_len


@asynccontextmanager
async def embedded_engine(
    config: Config,
    folder: ModelFolder,
    thread: TorchThread,
    *,
    slots: int = 0,
    length: int = 0,
    epoch: int = 0,
    alone: bool = False,
    run_dir: Path | None = None,
    name: str = "engine",
) -> AsyncIterator[LocalEngine]:
    """An engine over ``folder`` without weights yet; ``slots`` and ``length`` replace the config's where given.

    ``alone`` says that no trainer wants its GPU's memory. Its profile goes into ``run_dir``, under ``name``.
    """
    engine = LocalEngine(
        folder,
        slots=slots or rollout_slots(config),
        context_len=length or context_len(config, folder),
        dtype=config.train.dtype,
        device=config.cluster.device,
        thread=thread,
        epoch=epoch,
        exact=config.train.true_on_policy_mode,
        routing=config.train.routing_replay == "rollout",
        profile=StepProfile(run_dir / "profile", config.report.profile, config.rollout.max_staleness)
        if run_dir
        else None,
        peaks=PhasePeaks(run_dir / "memory" / f"{name}.json" if run_dir else None, config.cluster.device),
        name=name,
        share=SHARE_ALONE if alone and config.cluster.device != "cpu" else SHARE,
    )
    try:
        yield engine
    finally:
        await engine.close()
