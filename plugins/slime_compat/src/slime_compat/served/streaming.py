"""`slime.rollout.sglang_streaming_rollout`: one turn, as the core's partial rollout keeps what an abort leaves."""

from __future__ import annotations

from slime_compat.served.generation import generate as generate_streaming

__all__ = ["generate_streaming"]
