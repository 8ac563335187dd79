"""Verdicts to JSON and back: what a sample's metadata, a record and a judge's answer over HTTP hold.

JSON has no infinity: a float that is not finite travels as the text "inf", "-inf" or "nan".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from slime_kernelbench.types import Case, Diagnostic, Flag, Stage, Status, Timing, Verdict

STATUSES, STAGES = frozenset(get_args(Status)), frozenset(get_args(Stage))


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """JSON-ready fields.

    Example: verdict_from_json(verdict_to_json(verdict)) == verdict
    """
    fields: dict[str, Any] = _plain(asdict(verdict))
    return fields


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """The verdict that :func:`verdict_to_json` wrote; keys that it does not know are left out.

    Raises:
        ValueError: what is no verdict.
    """
    try:
        values = _known_fields(Verdict, data)
        values["diagnostics"] = tuple(
            Diagnostic(**_known_fields(Diagnostic, item)) for item in data.get("diagnostics", ())
        )
        values["cases"] = tuple(_case(item) for item in data.get("cases", ()))
        values["flags"] = tuple(Flag(**_known_fields(Flag, item)) for item in data.get("flags", ()))
        values["timing"] = _timing(data["timing"]) if data.get("timing") else None
        values["notes"] = tuple(map(str, data.get("notes", ())))
        values["layers"] = tuple(data.get("layers", ()))
        values["seconds"] = {str(name): float(value) for name, value in data.get("seconds", {}).items()}
        verdict = Verdict(**values)
        if verdict.status not in STATUSES or verdict.reached not in STAGES:
            raise ValueError(f"no verdict is {verdict.status!r:.40} at {verdict.reached!r:.40}")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is not a verdict: {error}") from error
    return verdict


def _case(data: Mapping[str, Any]) -> Case:
    values = _known_fields(Case, data)
    values |= {name: float(values[name]) for name in ("max_abs", "max_rel", "tolerance") if name in values}
    return Case(**{**values, "where": tuple(values.get("where", ()))})


def _timing(data: Mapping[str, Any]) -> Timing:
    values = _known_fields(Timing, data)
    texts = {name: float(value) for name, value in values.items() if isinstance(value, str) and name != "device"}
    return Timing(**{**values, **texts})


def _known_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: data[item.name] for item in fields(kind) if item.name in data}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
