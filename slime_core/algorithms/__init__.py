"""The algorithms: a file each, with formula, presets, needs and card; `shared` has the mathematics of several.

A new file NAME.py that sets ``ALGORITHM`` is a new value NAME of ``train.advantage_estimator``. Files are read by the
config, so at the top they import neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slime_core.algorithms.shared.card import Card

if TYPE_CHECKING:
    from slime_core.config.problems import Problem
    from slime_core.types import Batch, Columns

DEFAULT = "grpo"
OFFLINE = {"sft_loss": "sft", "dpo_loss": "dpo"}
"""Losses whose responses are the data's, so that nothing is generated or judged: each with its algorithm."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Algorithm(Card):
    """A value of ``train.advantage_estimator``: what a person reads of it, and what the run computes.

    ``advantages(batch, train)``, ``needs``, ``needs_when``, ``terms``, ``kl_in_reward`` and ``whitens`` are those of
    `protocols.Estimator`.

    Example: `slime_core/algorithms/rloo.py`
    """

    advantages: Callable[[Batch, Any], Columns]
    presets: Mapping[str, Any] = field(default_factory=dict)  # [train] keys where the config says auto or 0
    needs: frozenset[Any] = frozenset()  # roles
    needs_when: Callable[[Any], frozenset[Any]] | None = None
    terms: bool = True
    kl_in_reward: bool = False
    whitens: bool = False
    groups: bool = False  # compares a reward with others of its group: a group of one teaches nothing
    discounts: bool = False  # by gae_gamma also where credit_level is trajectory
    distils: bool = False  # learns from a teacher's log-probs
    spreads: bool = False  # a sample's advantage is its normalised reward, which a function of slime's may make
    conflicts: Callable[[Any], Iterable[Problem]] | None = None  # of a resolved stage, a Config
    notices: Callable[[Any], Iterable[str]] | None = None  # what is legal in a resolved stage and seldom meant


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Every algorithm of this folder by name, the default of ``train.advantage_estimator`` first."""
    names = sorted(entry.name for entry in iter_modules(__path__) if not entry.ispkg)
    names.sort(key=lambda name: name != DEFAULT)
    return MappingProxyType({name: import_module(f"{__name__}.{name}").ALGORITHM for name in names})
