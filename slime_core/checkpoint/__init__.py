"""Checkpoints: a training state, a loop's state and a manifest in one folder, published by one rename.

checkpoints/step-12/   trainer/...   state.json   [ledger.sqlite]   MANIFEST.json
"""

from slime_core.checkpoint.manifest import CheckpointMetadata, LoadedCheckpoint, check_dtype, check_state
from slime_core.checkpoint.store import Checkpoints

__all__ = ["CheckpointMetadata", "Checkpoints", "LoadedCheckpoint", "check_dtype", "check_state"]
