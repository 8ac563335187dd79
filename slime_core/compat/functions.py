"""Functions given by path, as answers to hooks: config keys in, Answers out. Nothing is loaded for an empty key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.compat.locate import locate
from slime_core.plugins.provider import Answer, Provider, answer
from slime_core.protocols import Estimator, Loss

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.types import Group


class Functions:
    """See `slime_core.plugins.router.Functions`."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], Answer] = {}
        self._files: set[Path] = set()

    def owner(self, hook: str, config: Config) -> Answer | None:
        """The function that answers an owner hook for the whole run."""
        if hook == "slime_reward" and config.reward.custom_rm_path:
            return self._answer(hook, "reward.custom_rm_path", config.reward.custom_rm_path, config)
        return None

    def of_task(self, hook: str, path: str, config: Config) -> Answer:
        """The function that a task chose."""
        return self._answer(hook, "data.tasks", path, config)

    def listeners(self, hook: str, config: Config) -> list[Answer]:
        """Functions for a vote or tell hook, in order."""
        return []

    def estimator(self, inner: Estimator, train: Any) -> Estimator:
        """``inner``, or what stands in its place."""
        return inner

    def loss(self, inner: Loss, train: Any) -> Loss:
        """``inner``, or what stands in its place."""
        return inner

    def files(self) -> list[Path]:
        """Files of all functions that were loaded."""
        return sorted(self._files)

    def close(self) -> None:
        """Take the import finder and the door away again."""

    def _answer(self, hook: str, key: str, path: str, config: Config) -> Answer:
        if (hook, path) not in self._answers:
            fn = locate(path, key)
            file = Path(inspect.getfile(inspect.unwrap(fn)))
            self._files.add(file)
            provider = Provider(name=key.split(".")[-1], origin=path, source="path", home=file)
            self._answers[hook, path] = answer(provider, hook, _reward(fn))
        return self._answers[hook, path]


def _reward(fn: Callable[..., Any]) -> Callable[..., Any]:
    async def slime_reward(group: Group, ctx: Context) -> list[Any]:
        values = []
        for sample in group.samples:
            value = fn(sample)
            values.append(await value if inspect.isawaitable(value) else value)
        return values

    return slime_reward
