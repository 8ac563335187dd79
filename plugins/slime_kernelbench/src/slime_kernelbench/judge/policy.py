"""The static policy: what it refuses in a candidate's source, and which kernels its answer is made of.

It reads the text as a tree and follows it from `ModelNew.forward`; nothing is matched by pattern, nothing is run.
It is a filter before the sandbox and the run-time checks, never a boundary of its own.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Literal

from slime_kernelbench.judge import names
from slime_kernelbench.judge.flow import Flow
from slime_kernelbench.judge.kernels import Kernels
from slime_kernelbench.judge.syntax import is_type_of
from slime_kernelbench.judge.unread import without_unread
from slime_kernelbench.judge.values import Finding, TooComplex
from slime_kernelbench.types import Diagnostic, Flag

MAX_CHARACTERS = 100_000
_SHOWN = 8  # findings told


@dataclass(slots=True, frozen=True, kw_only=True)
class Reading:
    """What the policy read.

    Example:
        Reading(status="ok", kernels=frozenset({"add_kernel"}), text="import torch\\n...")
    """

    status: Literal["ok", "rejected", "compile_error"]
    diagnostics: tuple[Diagnostic, ...] = ()
    flags: tuple[Flag, ...] = ()
    kernels: frozenset[str] = frozenset()  # launched from forward, as far as the text tells, and what they call
    text: str = ""  # what is to be run: the source, where functions that were not followed raise


def read(source: str, allow: frozenset[str] = frozenset()) -> Reading:
    """Read a candidate.

    Args:
        source: Its text, as sampled.
        allow: Further dotted names, such as ``torch.nn.functional.conv2d``, that may compute outside of kernels.

    Example:
        >>> read("def f(): pass").status
        'compile_error'
    """
    if len(source) > MAX_CHARACTERS:
        return _refused([Finding(0, "too_long", f"{len(source)} characters; at most {MAX_CHARACTERS}")], source)
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _unparsable(error, source)
    if not any(isinstance(node, ast.ClassDef) and node.name == "ModelNew" for node in tree.body):
        missing = Diagnostic(stage="static", kind="NameError", message="the code defines no class ModelNew")
        return Reading(status="compile_error", diagnostics=(missing,))
    flow = Flow(allow)
    findings = _everywhere(tree)
    try:
        flow.read(tree)
        kernels = Kernels(flow.kernels, flow.around, flow.inmost)
    except (TooComplex, RecursionError):
        return _refused([*findings, Finding(0, "too_complex", "too large or nested to be followed")], source)
    reached = kernels.reached(flow.launched)
    findings |= flow.findings | kernels.findings
    if not findings and not flow.launched:
        findings.add(Finding(0, "no_launch", "ModelNew.forward launches no kernel made by @triton.jit"))
    elif not findings and not reached & kernels.stores:
        findings.add(Finding(0, "decoy_launch", "no kernel that forward launches stores anything"))
    if findings:
        return _refused(sorted(findings), source)
    read_ids = flow.followed | {id(node) for node in flow.kernels.values()}
    return Reading(status="ok", kernels=frozenset(reached), text=without_unread(source, tree, read_ids))


def parse(source: str) -> ast.Module:
    """The tree of a source.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: Where it has none.
    """
    source.encode()  # a lone surrogate is a ValueError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _everywhere(tree: ast.Module) -> set[Finding]:
    """What is refused wherever it stands, reached or not."""
    findings: set[Finding] = set()
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    callees = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_type_of(node)}
    forbidden = names.FORBIDDEN_NAMES - bound  # such as a parameter `input`; Python's own is not there at run time
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name) and node.id in forbidden and isinstance(node.ctx, ast.Load):
            if id(node) in callees:
                continue
            findings.add(Finding(line, "dynamic_code", f"{node.id} is not allowed{names.HINTS.get(node.id, '')}"))
        elif isinstance(node, ast.Attribute) and names.is_inside(node.attr):
            findings.add(Finding(line, "forbidden_attribute", f"attribute {node.attr} opens Python's inside"))
    return findings


def _refused(findings: list[Finding], source: str) -> Reading:
    lines = source.splitlines()
    diagnostics = tuple(
        Diagnostic(
            stage="static",
            kind=finding.rule,
            message=finding.message,
            line=finding.line or None,
            excerpt=lines[finding.line - 1].strip()[:200] if 0 < finding.line <= len(lines) else "",
        )
        for finding in findings[:_SHOWN]
    )
    flags = {finding.rule: Flag(rule=finding.rule, layer="static", detail=finding.message) for finding in findings}
    return Reading(status="rejected", diagnostics=diagnostics, flags=tuple(flags.values()))


def _unparsable(error: BaseException, source: str) -> Reading:
    line = error.lineno if isinstance(error, SyntaxError) else None
    lines = source.splitlines()
    message = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
    message = "it is not UTF-8: save it as such" if isinstance(error, UnicodeError) else message
    diagnostic = Diagnostic(
        stage="static",
        kind=type(error).__name__,
        message=message.splitlines()[0][:300],
        line=line,
        excerpt=lines[line - 1].strip()[:200] if line and 0 < line <= len(lines) else "",
    )
    return Reading(status="compile_error", diagnostics=(diagnostic,))
