"""The plugin `models`: bridges by `slime_model_bridge`, and `slime models`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core import hookimpl
from slime_models.families import BRIDGES

if TYPE_CHECKING:
    import click

    from slime_convert.bridge import Bridge

slime_api = 1
slime_families = tuple(BRIDGES)


@hookimpl
def slime_model_bridge(hf_config: Any) -> Bridge | None:
    """The bridge of the config's family; None for an unknown family."""
    return BRIDGES.get(getattr(hf_config, "model_type", ""))


@hookimpl
def slime_command() -> click.Group:
    """`slime models list|show`."""
    from slime_models.command import models

    return models
