"""The border to a backend's functions: what they raise becomes an error with the package, the key and a command."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import PluginError, SlimeError, text_of

if TYPE_CHECKING:
    from slime_core.backends import Backend
    from slime_core.plugins.provider import Provider

B = TypeVar("B", bound="Backend")
ENTERED = frozenset({"start", "serve", "parts"})  # return async context managers
LISTED = frozenset({"problems", "rules", "notices"})  # may be generators


def guarded(backend: B, provider: Provider, key: str) -> B:
    """The backend with functions that raise PLG56 in place of anything that is no SlimeError.

    Example: guarded(EngineBackend(name="mine", start=start), provider, "rollout.rollout_engine")
    """
    changes: dict[str, Any] = {}
    for field in fields(backend):
        value = getattr(backend, field.name)
        if callable(value) and not inspect.isclass(value):
            border = Border(backend.name, provider, key, field.name)
            plain = border.listed if field.name in LISTED else border.called
            changes[field.name] = border.entered(value) if field.name in ENTERED else plain(value)
    return replace(backend, **changes)


@dataclass(slots=True, frozen=True)
class Border:
    """One function of a backend."""

    backend: str
    provider: Provider
    key: str
    function: str

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise PLG56 for what is raised inside."""
        try:
            yield
        except SlimeError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            name = self.provider.name if "==" in self.provider.origin else self.provider.origin
            raise PluginError(
                f"{self.key} = {self.backend}: {self.provider.origin} failed in `{self.function}`: {text_of(error)}",
                code="PLG56",
                where=f"{self.key}, {frame.filename}:{frame.lineno}",
                fix=f"slime plugins check {name}   or leave {self.key} out",
            ) from error

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A plain function."""

        def call(*args: Any, **keywords: Any) -> Any:
            with self.watched():
                return function(*args, **keywords)

        return call

    def listed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns several things, perhaps one after another."""
        return self.called(lambda *args, **keywords: tuple(function(*args, **keywords)))

    def entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that returns an async context manager; what the block inside raises passes."""

        @asynccontextmanager
        async def enter(*args: Any, **keywords: Any) -> AsyncIterator[Any]:
            async with AsyncExitStack() as stack:
                with self.watched():
                    value = await stack.enter_async_context(function(*args, **keywords))
                yield value

        return enter
