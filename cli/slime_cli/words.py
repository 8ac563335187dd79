"""How click hands over what it does not know: flags that are keys of the config, in the order they were typed."""

from __future__ import annotations

from typing import Any

PASSING: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
"""Context settings of a command whose arguments go on to `slime_core.config`."""
