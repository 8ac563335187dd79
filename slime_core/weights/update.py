"""One weight update: the trainer publishes, the engines load, and what they then serve is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from slime_core.protocols import Engine, Trainer


async def sync_weights(trainer: Trainer, engine: Engine, version: int) -> None:
    """Bring ``version`` from the trainer to the engine.

    Where the trainer sends checksums, every tensor of the engine is compared with them.

    Raises:
        EngineError: ENG83 the engine serves another version, or a tensor that differs (named).
    """
    update = await trainer.publish(version)
    await engine.load(update)
    if engine.version != version:
        raise EngineError(
            f"the engine serves version {engine.version} after version {version} was loaded",
            code="ENG83",
            why="weights did not reach the sampler",
        )
    if not update.fingerprints:
        return
    served = await engine.fingerprints()
    wrong = sorted(name for name, checksum in update.fingerprints.items() if served.get(name) != checksum)
    if wrong:
        raise EngineError(
            f"{len(wrong)} tensors of the engine differ from the trainer's after version {version}: {wrong[:5]}",
            code="ENG83",
            why="weights did not reach the sampler whole",
        )
