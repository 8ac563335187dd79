"""Tables and flags of the backends that plugins bring, as recipes and the command line name them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slime_core.errors import SlimeError, nearest
from slime_core.plugins.backends import BROUGHT_BY, KINDS, TRACKERS, brought_by, offered, tracker_keys
from slime_core.plugins.discover import available

if TYPE_CHECKING:
    from slime_core.backends import Backend


TRACKER_TABLE = f"plugin.{TRACKERS}"


class BackendTables:
    """Tables of backends as the command line sees them; a plugin is asked when a word begins with its name.

    Example:
        BackendTables().prefixed("sglang_mem_fraction_static") == ("sglang", "mem_fraction_static")
    """

    def __init__(self) -> None:
        self._installed = frozenset(info.name for info in available())
        self._plugins: tuple[str, ...] = ()
        self._backends: dict[str, list[Backend]] = {}

    def add(self, plugins: Sequence[str]) -> None:
        """Note the plugins of a run, by name or file: their backends may have other names than they."""
        self._plugins = tuple(plugins)
        self.__dict__.pop("_loaded", None)
        self.__dict__.pop("bare", None)

    @cached_property
    def _loaded(self) -> dict[str, list[Backend]]:
        """Backends of the run's plugins that have no installed plugin's name."""
        loaded: dict[str, list[Backend]] = {}
        for plugin in self._plugins:
            for backend in brought_by(plugin):
                if backend.name not in self._installed:
                    loaded.setdefault(backend.name, []).append(backend)
        return loaded

    def backends(self, name: str) -> list[Backend]:
        """Those of the plugin of a name, or those of a run's plugins that have it."""
        if name not in self._installed:
            return self._loaded.get(name, [])
        if name not in self._backends:
            self._backends[name] = brought_by(name)
        return self._backends[name]

    def names(self) -> list[str]:
        """All tables; every installed plugin is asked."""
        return [name for name in (*BROUGHT_BY, *sorted(self._installed), *self._loaded) if self.is_table(name)]

    def is_table(self, name: str) -> bool:
        """Whether ``[NAME]`` is a backend's, perhaps of one that is not installed."""
        return name in BROUGHT_BY or bool(self.backends(name))

    def fault(self, name: str) -> SlimeError | None:
        """Why the installed plugin of a name brings nothing; None where it loads, or is not installed."""
        try:
            for hook in KINDS if name in self._installed else ():
                offered(hook, name)
        except SlimeError as error:
            return error
        return None

    def kind(self, table: str, *keys: str) -> Any:
        """The type of an option's value, where the table has a model."""
        for backend in self.backends(table):
            if backend.name == table and backend.section is not None and len(keys) == 1:
                field = backend.section.model_fields.get(keys[0])
                return field.annotation if field else Any
        return Any

    def prefixed(self, flag: str) -> tuple[str, ...] | None:
        """Table, inner table if any, and key of ``NAME_KEY``; None for any other flag."""
        for name in dict.fromkeys((*BROUGHT_BY, *sorted(self._installed), *self._loaded)):
            if flag.startswith(f"{name}_") and self.is_table(name) and name not in self.bare_tables():
                rest = flag.removeprefix(f"{name}_")
                inner = next((t for b in self.backends(name) for t in b.tables if rest.startswith(f"{t}_")), "")
                return (name, inner, rest.removeprefix(f"{inner}_")) if inner else (name, rest)
        return None

    def misspelt(self, flag: str) -> tuple[str, str]:
        """Why ``NAME_KEY`` is no option, and what to do: its plugin does not load, or NAME is nearly a table's."""
        for name in sorted(self._installed):
            if flag.startswith(f"{name}_") and (error := self.fault(name)):
                return f"plugin '{name}' does not load: {error.what}", error.fix
        for name in self.names() if "_" in flag else ():
            words = flag.split("_")
            size = name.count("_") + 1
            head, rest = "_".join(words[:size]), words[size:]
            if rest and nearest(head, [name]):
                return (
                    f"no backend has a table [{head}]",
                    f"did you mean --{'-'.join([name, *rest]).replace('_', '-')}?",
                )
        return "", ""

    def bare_tables(self) -> set[str]:
        """Tables whose keys are flags by themselves."""
        return {table for table, _ in self.bare.values()}

    @cached_property
    def bare(self) -> dict[str, tuple[str, Any]]:
        """Keys that are flags by themselves: the table and the type of the value of each."""
        of_backends = {
            key: (backend.name, kind)
            for name in dict.fromkeys((*BROUGHT_BY, *self._plugins, *self._loaded))
            for backend in self.backends(name)
            if backend.flags is not None
            for key, kind in backend.flags().items()
        }
        return of_backends | {key: (TRACKER_TABLE, kind) for key, kind in tracker_keys().items()}
