"""Verdicts of the service's own: nothing could be judged; and those of others, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from slime_kernelbench.codec import verdict_from_json
from slime_kernelbench.types import Diagnostic, Verdict


def infra(kind: str, reason: str, *, source: str = "") -> Verdict:
    """The verdict where nothing could be judged; it masks the sample and is never a score.

    Example: infra("Deadline", "the judge did not answer in 600 s", source=source)
    """
    diagnostic = Diagnostic(stage="static", kind=kind, message=" ".join(reason.split())[:500])
    return Verdict(status="infra", reached="static", diagnostics=(diagnostic,), source_hash=hash_of(source))


def hash_of(source: str) -> str:
    """sha256 of a source as it was sampled, a lone surrogate as it stands."""
    return sha256(source.encode("utf-8", errors="surrogatepass")).hexdigest()


def read(data: Any, source: str) -> Verdict:
    """The verdict in an answer about ``source``.

    Raises:
        ValueError: it is none, or about another source.
    """
    if not isinstance(data, Mapping):
        raise ValueError("the answer holds no verdict")
    verdict = verdict_from_json(data)
    if verdict.source_hash and verdict.source_hash != hash_of(source):
        raise ValueError("the answer is about another source")
    return verdict
