"""Fakes, tiny models and contract suites, for our tests and plugin authors'."""

from __future__ import annotations

from slime_core.testing.models import tiny_model
from slime_core.testing.vision import tiny_vision_model

__all__ = ["tiny_model", "tiny_vision_model"]
