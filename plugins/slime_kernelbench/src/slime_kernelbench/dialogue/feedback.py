"""Feedback to the model: outcome, error, source lines, traceback, differences, speed.

    Attempt 1 of 3 does not compile.
    CompilationError (line 12): at 4:11: tl.arange needs a power of two
        | 12 |     at = tl.arange(0, 100)
    Traceback: ...

    Find the cause, mend it, ...

Everything comes from `Verdict`, which holds no expected value, no input and no seed. Each field has at most
``feedback_tokens`` tokens; of a longer one the beginning and the end stay, where messages have their substance.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from slime_core.data.chat import decode, encode
from slime_kernelbench.dialogue.words import Words
from slime_kernelbench.types import Case, Diagnostic, Timing, Verdict

if TYPE_CHECKING:
    from slime_kernelbench.options import Options

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CUT = " [...] "
CASES = 3  # that are told, of those that disagree
LONGEST = 16_384  # characters of a field before its tokens are counted
OUTCOME = {
    "correct": "is right",
    "wrong": "runs and gives wrong results",
    "rejected": "is refused by the rules",
    "compile_error": "does not compile",
    "runtime_error": "fails when it runs",
    "timeout": "does not end in time",
    "hack": "does not compute what it returns",
}
NO_CODE = "no_code"
"""Kind of the diagnostic where an answer has no code: nothing was judged."""


def tell(verdict: Verdict, *, attempt: int, options: Options, words: Words, tokenizer: Any) -> str:
    """The feedback on attempt number ``attempt`` (from 1) in the style that the options name."""
    tokens = options.feedback_tokens
    if options.feedback_style == "kind":
        return clip(kind(verdict), tokens, tokenizer)
    if options.feedback_style == "brief":
        return brief(verdict, tokenizer=tokenizer, tokens=tokens)
    if options.feedback_style == "results":
        return results(verdict, tokens=tokens, tokenizer=tokenizer)
    return write(verdict, attempt=attempt, of=options.max_turns, words=words, tokenizer=tokenizer, tokens=tokens)


def write(verdict: Verdict, *, attempt: int, of: int, words: Words, tokenizer: Any, tokens: int) -> str:
    """The whole feedback on attempt number ``attempt`` (from 1) of ``of``; ``tokens`` a field.

    Example:
        write(verdict, attempt=1, of=3, words=words, tokenizer=tokenizer, tokens=256)
    """
    coded = _kind(verdict) != NO_CODE
    outcome = OUTCOME[verdict.status] if coded else "has no code to judge"
    lines = [f"Attempt {attempt} of {of} {outcome}.", *_details(verdict, tokenizer, tokens)]
    request = words.requests["no_code" if not coded else verdict.status]
    return "\n".join([*lines, "", request])


def results(verdict: Verdict, *, tokens: int, tokenizer: Any) -> str:
    """Compiled, correct, runtime, speed-up and error, a line each where there is one.

    Example: "- Compiled: yes\\n- Correct: no\\n- Error: 8x64 normal: differs by 0.531 at [3, 5], tolerance 0.0001"
    """
    lines = [f"- Compiled: {_yes(verdict.compiled)}", f"- Correct: {_yes(verdict.correct and not verdict.flags)}"]
    if verdict.timing is not None:
        lines.append(f"- Runtime: {verdict.timing.slower:.3f} ms")
        lines.append(f"- Speedup: {verdict.timing.speedup:.2f}x")
    errors = [f"{d.kind}{_line(d)}: {d.message}" for d in verdict.diagnostics[:1]]
    errors += [_case(case) for case in _wrong(verdict)[:1]]
    errors += [f"{flag.rule}: {flag.detail}".rstrip(": ") for flag in verdict.flags[:1]]
    return "\n".join([*lines, *(clip(f"- Error: {error}", tokens, tokenizer) for error in errors[:1])])


def kind(verdict: Verdict) -> str:
    """The outcome and its kind, without numbers or places.

    Example: "wrong: values"
    """
    return ": ".join(filter(None, [verdict.status, _kind(verdict)]))


def brief(verdict: Verdict, *, tokenizer: Any, tokens: int) -> str:
    """One line, for small models: the status, and the first thing that tells most. No measured difference is in it,
    so that the same answer is told the same, whatever inputs were drawn.

    Example: "wrong: 8x64 normal"
    """
    wrong = [f"{c.shapes} {c.regime}" + ("" if math.isfinite(c.max_abs) else ", not finite") for c in _wrong(verdict)]
    messages = wrong[:1] or [f"{d.kind}{_line(d)}: {d.message}" for d in verdict.diagnostics[:1]]
    messages = messages or [flag.rule for flag in verdict.flags[:1]]
    if verdict.timing is not None and not messages:
        messages = [f"{_short(verdict.timing.speedup)}x"]
    return clip(": ".join([verdict.status, *messages]).replace("\n", " "), tokens, tokenizer)


def clip(text: str, tokens: int, tokenizer: Any) -> str:
    """A field of at most ``tokens`` tokens, free of control characters: two thirds from its beginning, the rest from
    its end where it is longer.
    """
    text = CONTROL.sub("", text.replace("\t", "    ").replace("\r\n", "\n"))
    if len(text) > LONGEST:
        text = text[: LONGEST * 2 // 3] + CUT + text[-LONGEST // 3 :]
    ids = encode(tokenizer, text)
    if len(ids) <= tokens:
        return text
    room = max(tokens - len(encode(tokenizer, CUT)), 2)
    head, tail = ids[: room - room // 3], ids[len(ids) - room // 3 :]
    return f"{decode(tokenizer, head)}{CUT}{decode(tokenizer, tail)}".replace("\ufffd", "")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _kind(verdict: Verdict) -> str:
    return verdict.diagnostics[0].kind if verdict.diagnostics else ""


def _details(verdict: Verdict, tokenizer: Any, tokens: int) -> list[str]:
    lines: list[str] = []
    for diagnostic in verdict.diagnostics[:2]:
        lines += _diagnostic(diagnostic, tokenizer, tokens)
    wrong = _wrong(verdict)
    if verdict.cases:
        lines.append(f"{len(verdict.cases) - len(wrong)} of {len(verdict.cases)} cases agree with PyTorch.")
    lines += [clip(f"- {_case(case)}", tokens, tokenizer) for case in wrong[:CASES]]
    lines += [clip(f"- {flag.rule}: {flag.detail}".rstrip(": "), tokens, tokenizer) for flag in verdict.flags[:CASES]]
    if verdict.timing is not None:
        lines.append(_speed(verdict.timing))
    return lines


def _wrong(verdict: Verdict) -> list[Case]:
    return [case for case in verdict.cases if not case.agrees]


def _diagnostic(diagnostic: Diagnostic, tokenizer: Any, tokens: int) -> list[str]:
    lines = [clip(f"{diagnostic.kind}{_line(diagnostic)}: {diagnostic.message}", tokens, tokenizer)]
    if diagnostic.excerpt.strip():
        lines += ["```", clip(diagnostic.excerpt.strip("\n"), tokens, tokenizer), "```"]
    if diagnostic.traceback.strip():
        lines += ["Traceback:", clip(diagnostic.traceback.strip("\n"), tokens, tokenizer)]
    return lines


def _line(diagnostic: Diagnostic) -> str:
    return "" if diagnostic.line is None else f" (line {diagnostic.line})"


def _case(case: Case) -> str:
    name = f"{case.shapes} {case.regime}".strip()
    if not math.isfinite(case.max_abs):
        return f"{name}: not finite{_place(case)}"
    return f"{name}: differs by {_short(case.max_abs)}{_place(case)}, tolerance {_short(case.tolerance)}"


def _place(case: Case) -> str:
    return f" at [{', '.join(map(str, case.where))}]" if case.where else ""


def _speed(timing: Timing) -> str:
    compiled = "" if timing.compiled is None else f", compiled {_short(timing.compiled)} ms"
    ratio = timing.slower
    return (
        f"Speed: {_short(ratio)} ms; PyTorch {_short(timing.eager)} ms{compiled}: "
        f"{_short(timing.speedup)} times as fast as the faster of these."
    )


def _short(value: float) -> str:
    return f"{value:.3g}"
