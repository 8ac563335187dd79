"""A checked Completion from SGLang's answer to a request.

    bodies.check -> bodies.body -> [HTTP] -> completion: ids, log-probs, finish, the version of every token

Pure. What SGLang (0.5.12, 0.5.23) cannot be told, or tells otherwise than the embedded engine, is evened out here:
- ``output_token_logprobs`` are of softmax(logits / temperature), before top-k and top-p. So ``plain_log_probs`` are
  empty where the temperature is neither 0 nor 1, and ``log_probs`` do not know what top-k and top-p left out.
- Greedy draws have log-prob 0, and SGLang's number is the plain one.
- Its stop strings see new tokens alone, and ``ignore_eos`` turns stop token ids off: see `stop_strings`.
"""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core.engines.admission import too_long
from slime_core.errors import EngineError
from slime_core.routed_experts import routed_rows
from slime_core.types import Completion
from slime_sglang.http import fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest

SLACK = 1e-4  # a log-prob may exceed 0 by rounding
GREEDY = 1e-6
"""SGLang takes a temperature below this for 0."""
SPANS = "version_spans"
"""Feature: an answer says which version made which of its tokens."""
TOO_LONG = ("context length", "maximum allowed length", "longer than the")
"""What a refusal says where a prompt does not fit."""

Finish = Literal["stop", "length", "abort"]
ENDS: Mapping[Any, Finish] = {"stop": "stop", "length": "length"}


@dataclass(slots=True, kw_only=True)
class ExpectedAnswer:
    """What an answer must fit.

    Example: ExpectedAnswer(request=request, limit=64, vocab_size=151936, epoch=2, low=4, high=5, spans=True)
    """

    request: GenerateRequest
    limit: int  # new tokens, at most
    vocab_size: int
    epoch: int
    low: int  # versions that may have made its tokens
    high: int
    spans: bool  # the server tells the version of every token
    experts: tuple[int, int] | None = None  # layers, and experts a token, where the answer says which were chosen


def meta(answer: Any, where: str) -> dict[str, Any]:
    """The ``meta_info`` of an answer that has the shape of one; ServerFault ENG71 where it has not."""
    info = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(info, dict) or not isinstance(answer.get("output_ids"), list):
        raise fault(
            "the answer is not one of SGLang's /generate",
            "ENG71",
            where,
            running=True,
            why=f"it says {repr(answer)[:200]}, and output_ids and meta_info are missing",
            fix="look which service has this port",
        )
    return info


def completion(answer: Any, expected: ExpectedAnswer, *, final: bool = True) -> Completion:
    """Check an answer and read it; with ``final`` False it is a piece of a stream, its finish ``abort``.

    Raises:
        ServerFault: ENG71 its shape, ENG79 lists that differ in length or ids, TOK44 ids outside the vocabulary, ENG80
            impossible log-probs, ENG81 no tokens or an unknown end, ENG82 more than was asked for, ENG83 versions.
        EngineError: ENG72 or ENG78, the server says that the request is at fault.
    """
    request = expected.request
    where = f"request {request.id}"
    info = meta(answer, where)
    finish = _finish(info, where) if final else "abort"
    tokens: list[int] = answer["output_ids"]
    if final and finish == "abort" and expected.experts is not None and info.get("routed_experts") is None:
        return nothing(request, expected.epoch, "abort")  # retracted before: without experts they are of no use
    count = len(tokens)
    _check_counts(info, tokens, expected, where)
    values = log_probs(info.get("output_token_logprobs"), tokens, where)
    _check_outputs(tokens, expected.vocab_size, where)
    if not count and finish == "stop":
        raise fault("the server ended the request without a token", "ENG81", where, again=True)
    if not count and finish == "length":
        raise too_long(f"the server had no room for a token after {len(request.tokens)}", where)
    temperature = request.params.temperature
    greedy = temperature < GREEDY
    text = answer.get("text")
    return Completion(
        id=request.id,
        tokens=tokens,
        log_probs=[0.0] * count if greedy else values,
        plain_log_probs=(values.copy() if temperature == 1 else values) if greedy or temperature == 1 else [],
        finish=finish,
        versions=versions(info, count, expected, where),
        epoch=expected.epoch,
        text=text if isinstance(text, str) else "",
        seconds=_seconds(info),
        routed_experts=_experts(info, len(request.tokens) + count - 1, expected, where) if final and count else None,
    )


def nothing(request: GenerateRequest, epoch: int, finish: Literal["length", "abort"]) -> Completion:
    """The completion of a request that has no tokens."""
    return Completion(
        id=request.id, tokens=[], log_probs=[], plain_log_probs=[], finish=finish, versions=[], epoch=epoch
    )


def _experts(
    info: Mapping[str, Any], rows: int, expected: ExpectedAnswer, where: str
) -> NDArray[np.integer[Any]] | None:
    """[rows, layers, k] of base64 int32; of all layers, with numbers of no meaning for those without experts.

    Raises:
        ServerFault: ENG79 they are missing, or of other lengths.
    """
    if expected.experts is None:
        return None
    text = info.get("routed_experts")
    try:
        numbers = np.frombuffer(b64decode(str(text), validate=True), dtype="<i4").reshape(rows, *expected.experts)
    except ValueError:
        problem = "no routed experts" if text is None else "routed experts that do not fit"
        raise fault(
            f"{rows + 1} tokens came with {problem}",
            "ENG79",
            where,
            why=f"{' x '.join(map(str, expected.experts))} a token were requested",
            fix="start the server with --enable-return-routed-experts",
        ) from None
    return routed_rows(numbers)


def _seconds(info: Mapping[str, Any]) -> dict[str, float]:
    """Times that a server with ``enable_metrics`` says."""
    queue, start, end = (info.get(name) for name in ("queue_time", "forward_entry_time", "prefill_finished_time"))
    if not (isinstance(queue, float) and isinstance(start, float) and isinstance(end, float)):
        return {}
    return {"queue": queue, "prefill": max(0.0, end - start)}


def _finish(info: Mapping[str, Any], where: str) -> Finish:
    info_reason = info.get("finish_reason")
    reason: dict[str, Any] = info_reason if isinstance(info_reason, dict) else {}
    kind = reason.get("type")
    if finish := ENDS.get(kind):
        if reason.get("matched") == "NaN happened":  # SGLang's own words, with a token of its choice
            raise fault("the server drew a token from logits that are not finite", "ENG80", where)
        return finish
    if kind == "abort":
        status, message = reason.get("status_code"), str(reason.get("message") or "")
        if status == 400:
            raise refusal(f"the server refuses the request: {message}", where)
        if isinstance(status, int) and status >= 400:
            raise fault(f"the server gave the request up (status {status}): {message}", "ENG75", where, again=True)
        return "abort"
    raise fault(
        f"the request ended for an unknown reason, {info_reason!r}"[:300],
        "ENG81",
        where,
        again=True,
        fix="SGLang 0.5.12 and 0.5.23 are known here",
    )


def refusal(message: str, where: str) -> EngineError:
    """What a server answers with status 400 to a request: ENG72 where it is too long, else ENG78."""
    if any(words in message for words in TOO_LONG):
        return too_long(message, where)
    return EngineError(message, code="ENG78", where=where, fix="see the server's log")


def _check_counts(info: Mapping[str, Any], tokens: list[int], expected: ExpectedAnswer, where: str) -> None:
    count, prompt = len(tokens), expected.request.tokens
    if count > expected.limit:
        echoed = tokens[: len(prompt)] == prompt
        raise fault(
            f"{count} tokens came, but at most {expected.limit} were requested",
            "ENG82",
            where,
            why="they begin with the prompt" if echoed else "the server did not keep max_new_tokens",
        )
    stated = info.get("completion_tokens", count)
    if stated != count:
        echoed = tokens[: len(prompt)] == prompt
        raise fault(
            f"the answer has {count} tokens and says it has {stated}",
            "ENG82",
            where,
            why="they begin with the prompt" if echoed else "",
        )
    reported = info.get("prompt_tokens", len(prompt))
    if reported != len(prompt):
        raise fault(f"the prompt has {len(prompt)} tokens and the server saw {reported}", "ENG82", where)


def log_probs(rows: Any, tokens: list[int], where: str) -> list[float]:
    """The numbers of ``[[log-prob, id, ...], ...]``, whose ids must be ``tokens``.

    Raises:
        ServerFault: ENG79 missing, of another length or of other ids; ENG80 not finite or above 0.
    """
    if not isinstance(rows, list):
        if not tokens and rows is None:
            return []
        raise fault(f"{len(tokens)} tokens came without log-probs", "ENG79", where)
    if len(rows) != len(tokens):
        raise fault(f"{len(tokens)} tokens came with {len(rows)} log-probs", "ENG79", where)
    try:
        values, ids = [row[0] for row in rows], [row[1] for row in rows]
    except (TypeError, IndexError, KeyError):
        raise fault("the log-probs are not a list of numbers and ids", "ENG79", where) from None
    if ids != tokens:
        at = next(i for i, (a, b) in enumerate(zip(ids, tokens)) if a != b)
        raise fault(f"token {at} is {tokens[at]}, and its log-prob is of {ids[at]}", "ENG79", where)
    try:
        fine = not values or (math.isfinite(sum(values)) and max(values) <= SLACK)
    except TypeError:
        fine = False
    if not fine:
        raise _impossible(values, where)
    return values


def _impossible(values: list[Any], where: str) -> EngineError:
    numeric = [isinstance(value, (int, float)) for value in values]
    if not all(ok or value is None for ok, value in zip(numeric, values)):
        return fault("the log-probs are not a list of numbers and ids", "ENG79", where)
    fine = (ok and math.isfinite(value) and value <= SLACK for ok, value in zip(numeric, values))
    at = next((i for i, ok in enumerate(fine) if not ok), 0)
    return fault(
        f"log-prob {values[at]} at response token {at} of {len(values)}",
        "ENG80",
        where,
        why="a log-prob is finite and not above 0; null is what SGLang sends for NaN and -inf",
    )


def _check_outputs(tokens: list[int], vocab_size: int, where: str) -> None:
    if not tokens:
        return
    if set(map(type, tokens)) != {int}:
        raise fault("the new tokens are not a list of ids", "ENG79", where)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        at = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise fault(
            f"token id {tokens[at]} at response token {at} is outside the vocabulary of {vocab_size}",
            "TOK44",
            where,
            fix="serve the model of rollout.hf_checkpoint",
        )


def versions(info: Mapping[str, Any], count: int, expected: ExpectedAnswer, where: str) -> list[int]:
    """Which weights made each of ``count`` tokens: by the answer's spans, else its one stamp for all.

    Raises:
        ServerFault: ENG83 a stamp that is missing, of another epoch, older or newer than possible.
    """
    if not count:
        return []
    spans = info.get("weight_versions")
    if spans is None:
        if expected.spans and expected.low != expected.high:
            raise fault("the answer does not say which weights made which tokens", "ENG83", where)
        return [version(info.get("weight_version"), expected, where)] * count
    token_versions: list[int] = []
    try:
        for span in spans:
            if span["start"] != len(token_versions) or not len(token_versions) < span["end"] <= count:
                raise ValueError
            token_versions += [version(span["version"], expected, where)] * (span["end"] - span["start"])
        if len(token_versions) != count:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise fault(f"the spans of versions do not cover {count} tokens: {spans!r}"[:400], "ENG83", where) from None
    return token_versions


def version(stamp: Any, expected: ExpectedAnswer, where: str) -> int:
    """The number of a stamp ``EPOCH.VERSION``; ServerFault ENG83 where it is not one that may be."""
    epoch, _, number = stamp.partition(".") if isinstance(stamp, str) else ("", "", "")
    if not (epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()):
        reason = "its weights were not loaded by this run"
    elif int(epoch) != expected.epoch:
        reason = f"this process is epoch {expected.epoch}"
    elif int(number) < expected.low:
        reason = f"older than version {expected.low}"
    elif int(number) > expected.high:
        reason = f"newer than version {expected.high}"
    else:
        return int(number)
    raise fault(
        f"the server stamps weight version {stamp!r}, which cannot be",
        "ENG83",
        where,
        why=reason,
        fix="nothing else may load weights into this server",
    )


def scores(answer: Any, tokens: Sequence[int], start: int, *, unnamed: Collection[int]) -> NDArray[np.float32]:
    """Log-probs of ``tokens[start:]``, float32 [len(tokens) - start].

    SGLang tells ``unnamed`` ids as 0 there: the last of the vocabulary, and placeholders of pictures.

    Raises:
        ServerFault: ENG71, ENG79 and ENG80, as `completion`; ENG81 the server ended it.
    """
    info = meta(answer, "score")
    if _finish(info, "score") == "abort":
        raise fault("the server ended the request", "ENG81", "score", again=True)
    rows = info.get("input_token_logprobs")
    if not isinstance(rows, list) or len(rows) != len(tokens) - start + 1:
        count = len(rows) - 1 if isinstance(rows, list) else "no"
        raise fault(f"{len(tokens) - start} log-probs were requested and {count} came", "ENG79", "score")
    echoed = [
        0 if token in unnamed and isinstance(row, list) and row[1:2] == [0] else token
        for token, row in zip(tokens[start:], rows[1:], strict=True)
    ]
    return np.asarray(log_probs(rows[1:], echoed, "score"), dtype=np.float32)
