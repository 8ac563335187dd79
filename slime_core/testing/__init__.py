"""Fakes, tiny models and contract suites, for our tests and plugin authors'."""

from __future__ import annotations

from slime_core.testing.models import tiny_model

__all__ = ["tiny_model"]
