"""Check what hooks return: the type, rewards, columns of advantages, and the groups of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import PluginError
from slime_core.plugins.boundary import HookImpl, wrong
from slime_core.types import Batch, Columns, Group, Reward

T = TypeVar("T")


def expect(impl: HookImpl, value: Any, kind: type[T], about: str, fix: str) -> T:
    """The value, of the type that the hook must return.

    Raises:
        PluginError: PLG57.
    """
    if not isinstance(value, kind):
        returned = "None" if value is None else f"a {type(value).__name__}"
        raise wrong(impl, f"returned {returned}, not a {kind.__name__},", about, code="PLG57", fix=fix)
    return value


def same_groups(impl: HookImpl, done: Any, issued: list[Group], about: str) -> dict[str, Group]:
    """The returned groups by id, those that were issued.

    Raises:
        PluginError: PLG57 no list of groups, PLG59 a group that is missing, twice or new.
    """
    groups = expect(impl, done, list, about, "return the groups")
    by_id = {expect(impl, group, Group, about, "return the groups").id: group for group in groups}
    missing = [group.id for group in issued if group.id not in by_id]
    if missing or len(by_id) != len(groups) or len(by_id) != len(issued):
        message = f"returned {len(groups)} groups, not the {len(issued)} it was given,"
        reason = f"missing: {', '.join(missing[:5])}" if missing else "a group was returned twice or never issued"
        fix = "return every group, with its prompt"
        raise wrong(impl, message, about, code="PLG59", why=reason, fix=fix)
    return by_id


RETURNED = ("advantages", "returns")


def checked_columns(impl: HookImpl, returned: Any, batch: Batch) -> Columns:
    """``advantages`` and perhaps ``returns`` as float32 of R entries.

    Raises:
        PluginError: PLG57 no ``advantages`` or not numbers, PLG58 not finite (named by sample), PLG59 another length.
    """
    about = f"step {batch.version}"
    if not isinstance(returned, Mapping) or "advantages" not in returned:
        have = list(returned) if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
        raise wrong(impl, f"returned {have}", about, code="PLG57", fix='return {"advantages": an array of R floats}')
    columns: Columns = {}
    for name, values in returned.items():
        column = np.asarray(values) if not isinstance(values, (str, bytes)) else np.asarray(None)
        if name not in RETURNED or column.dtype.kind not in "fiub":
            reason = f"an estimator returns {' and '.join(RETURNED)}, arrays of numbers"
            raise wrong(impl, f"returned '{name}' of type {column.dtype}", about, code="PLG57", why=reason)
        if column.shape != batch.loss_mask.shape:
            message = f"returned '{name}' of shape {column.shape}, not {batch.loss_mask.shape},"
            fix = "per_sample[batch.sample_of_token()] spreads values of samples over tokens"
            reason = "one value a response token of the whole step"
            raise wrong(impl, message, about, code="PLG59", why=reason, fix=fix)
        columns[name] = _finite(impl, name, column.astype(np.float32), batch)
    return columns


def _finite(impl: HookImpl, name: str, column: NDArray[np.float32], batch: Batch) -> NDArray[np.float32]:
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        sample = int(np.searchsorted(batch.response_offsets, bad[0], side="right")) - 1
        message = (
            f"returned '{name}' with {column[bad[0]]} at response token {bad[0] - batch.response_offsets[sample]} "
            f"of sample '{batch.sample_ids[sample]}' ({bad.size} such values)"
        )
        raise wrong(impl, message, f"step {batch.version}", code="PLG58", why="nothing is replaced by 0 silently")
    return column


LARGEST = 1e30  # above it a reward is a mistake: its square leaves float32 long before
TYPES = "a float, int, bool, numpy scalar, Reward, or a dict with reward.reward_key"


def to_rewards(impl: HookImpl, value: Any, group: Group, reward_key: str) -> list[Reward]:
    """One Reward a sample of the group.

    Raises:
        PluginError: PLG57 a type that is none of the documented, PLG58 not finite or huge, PLG59 another count.
    """
    about = f"prompt '{group.id}'"
    if not isinstance(value, (list, tuple)):
        fix = "return a list with one reward a sample"
        raise wrong(impl, f"returned {_kind(value)}, not a list", about, code="PLG57", fix=fix)
    if len(value) != len(group.samples):
        message, reason = f"returned {len(value)} rewards, not {len(group.samples)},", "one reward a sample, in order"
        raise wrong(impl, message, about, code="PLG59", why=reason)
    return [
        to_reward(impl, item, f"sample '{sample.id}'", reward_key)
        for item, sample in zip(value, group.samples, strict=True)
    ]


def to_reward(impl: HookImpl, value: Any, about: str, reward_key: str) -> Reward:
    """One Reward from any of the documented types; a dict's other numbers become its terms.

    Raises:
        PluginError: PLG57 any other type, PLG58 a value that is not finite or above 1e30.
    """
    reward = value if isinstance(value, Reward) else _coerced(impl, value, about, reward_key)
    numbers = {name: _float(impl, number, about) for name, number in (("", reward.value), *reward.terms.items())}
    for name, number in numbers.items():
        if not math.isfinite(number) or abs(number) > LARGEST:
            term = f"'{name}' = " if name else ""
            reason = f"a reward is finite and at most {LARGEST:g} in size; nothing is replaced by 0"
            fix = 'return Reward(value=0.0, kind="infra_error", reason=...) where nothing could be judged'
            raise wrong(impl, f"returned {term}{number}", about, code="PLG58", why=reason, fix=fix)
    return Reward(value=numbers.pop(""), kind=reward.kind, terms=numbers, reason=reward.reason)


def _float(impl: HookImpl, value: Any, about: str) -> float:
    if not _is_number(value):
        raise _not_a_reward(impl, value, about)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _coerced(impl: HookImpl, value: Any, about: str, reward_key: str) -> Reward:
    if _is_number(value):
        return Reward(value=value)
    if isinstance(value, Mapping):
        if not reward_key or reward_key not in value:
            named = f"reward.reward_key is '{reward_key}'" if reward_key else "reward.reward_key is not set"
            keys = [str(key) for key in value]
            message, fix = f"returned a dict with keys {keys}, but {named},", f"reward.reward_key={[*keys, 'NAME'][0]}"
            raise wrong(impl, message, about, code="PLG57", fix=fix)
        terms = {str(name): number for name, number in value.items() if name != reward_key and _is_number(number)}
        return Reward(value=value[reward_key], terms=terms)
    raise _not_a_reward(impl, value, about)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))


def _not_a_reward(impl: HookImpl, value: Any, about: str) -> PluginError:
    tensor = hasattr(value, "item") and hasattr(value, "dtype")
    fix = "call .item() on it" if tensor else "return a number"
    return wrong(impl, f"returned {_kind(value)}", about, code="PLG57", why=f"a reward is {TYPES}", fix=fix)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    shown = f" {text}" if isinstance(value, (str, bytes)) and len(text) <= 40 else ""
    size = f" of {len(value)}" if isinstance(value, Sequence) and not shown else ""
    module = type(value).__module__.split(".")[0]
    name = type(value).__name__ if module in ("builtins", "slime_core") else f"{module} {type(value).__name__}"
    return f"a {name}{size}{shown}"
