"""What a hook answered, checked: its kind, and the groups of a rollout against those that it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.plugins.boundary import wrong
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.plugins.provider import Answer

T = TypeVar("T")


def expect(answer: Answer, value: Any, kind: type[T], about: str, fix: str) -> T:
    """The value, of the kind that the hook must give.

    Raises:
        PluginError: PLG57.
    """
    if not isinstance(value, kind):
        found = "None" if value is None else f"a {type(value).__name__}"
        raise wrong(answer, f"returned {found}, not a {kind.__name__},", about, code="PLG57", fix=fix)
    return value


def same_groups(answer: Answer, done: Any, issued: list[Group], about: str) -> dict[str, Group]:
    """The answered groups by id, those that were issued.

    Raises:
        PluginError: PLG57 no list of groups, PLG59 a group that is missing, twice or new.
    """
    groups = expect(answer, done, list, about, "return the groups")
    made = {expect(answer, group, Group, about, "return the groups").id: group for group in groups}
    missing = [group.id for group in issued if group.id not in made]
    if missing or len(made) != len(groups) or len(made) != len(issued):
        raise wrong(
            answer,
            f"returned {len(groups)} groups, not the {len(issued)} it was given,",
            about,
            code="PLG59",
            why=f"missing: {', '.join(missing[:5])}" if missing else "a group came twice or was never issued",
            fix="return every group, with the prompt it came with",
        )
    return made
