"""Check the vocabulary of CONTRIBUTING.md: names, first lines of docstrings, and messages.

Run over ``slime_core``, ``cli/slime_cli`` and ``plugins/*/src``; prints one line a finding and ends with 1 if there
are any.

Example: python tools/docs/check_names.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTICIPLES = (
    "asked begun brought drawn found given gone got heard held kept known left lent made said seen taken told"
)
PRONOUNS = "each here mine ours own theirs there these wanted what who why"
BANNED = frozenset(f"{PARTICIPLES} {PRONOUNS}".split())
PARAMETERS = frozenset({"what", "why"})
"""Allowed as parameters: parts of an error, and the kinds of memory that an engine or trainer releases."""
FORMATS = {
    "CheckResult.found": "`slime doctor --json`, and plugins' own checks",
    "PluginFinding.found": "`slime plugins check --json`",
    "DriverRecord.asked": "the record of a detached driver",
    "Done.kept": "`slime convert --json`",
    "GenerateRequest.kept": "requests on the wire",
    "Held.held": "answers of the rollout buffer",
    "Known.told": "a column of the rollout buffer's store",
}
"""Fields with one of these names that files, JSON or HTTP carry, and where."""
SHARED = {
    "Model": "the class that KernelBench's format asks of every problem",
    "Options": "the options of a plugin",
    "Sample": "slime's own sample under its name, for functions written for it",
    "Problem": "of a config, and on the wire of the buffer",
}
"""Class names that stand in several files, and why."""
METAPHORS = re.compile(
    "(ageing|deal|desk|flight|gate|lineup|lodging|parking|portion|pulse|race|seat|streak|surplus)s?"
)
"""Not a word of a class, function or file, for which Words in CONTRIBUTING.md has the field's term."""
TERMS = ("InFlight", "in_flight", "gate_up", "gate_weight", "Races", "races")
"""Terms of the field with one of these words: requests in flight, a projection, data races."""
WIDTH = 119
MOULD = re.compile(r"\bin[,;]? [^.]*\bout\b")
DIALECT = re.compile(
    r"\b(mends?|go(es)? on|went on|asked for|is told|stands? still|an? \w+ of its own)\b"
    r"|(?<!here )\bis no (?!longer|limit)"
)
"""What messages do not say: fix, resume or continue, requested, is called, is blocked, in its own, is not a."""


def sources(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every file of the checked packages with its tree; templates are text."""
    for folder in (root / "slime_core", root / "cli/slime_cli", *sorted(root.glob("plugins/*/src"))):
        for path in sorted(folder.rglob("*.py")):
            if "templates" not in path.parts:
                yield str(path.relative_to(root)), ast.parse(path.read_text())


def bindings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether it is a parameter, of whatever a function binds, ``self`` and ``cls`` aside."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    nodes = {id(node): node for function in functions for node in ast.walk(function)}
    for node in nodes.values():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.lineno, node.arg, True
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name, False


def is_banned(name: str, *, parameter: bool, pairs: bool) -> bool:
    """Whether a name says nothing of its value; ``left`` beside ``right`` does, which is what ``pairs`` tells."""
    return name in BANNED and not (parameter and name in PARAMETERS) and not (name == "left" and pairs)


def locals_of(file: str, tree: ast.Module) -> Iterator[str]:
    """Findings on names that functions bind."""
    bound = list(bindings(tree))
    pairs = any(name == "right" for _, name, _ in bound)
    for line, name, parameter in bound:
        if is_banned(name, parameter=parameter, pairs=pairs):
            yield f"{file}:{line}: '{name}' does not say what the value is: use a noun"


def members(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, class (empty for functions) and name of functions, fields and attributes that are set on ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "", node.name
        for item in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
            if (
                isinstance(item, ast.Attribute)
                and isinstance(item.ctx, ast.Store)
                and ast.unparse(item.value) == "self"
            ):
                yield item.lineno, node.name, item.attr
            elif isinstance(item, ast.AnnAssign) and item in node.body:
                yield item.lineno, node.name, ast.unparse(item.target)


def members_of(file: str, tree: ast.Module) -> Iterator[str]:
    """Findings on names of functions, fields and attributes; fields may have the names of an error's parts."""
    for line, owner, name in members(tree):
        allowed = f"{owner}.{name}" in FORMATS or (owner and name in PARAMETERS)
        if name.strip("_") in BANNED and not allowed:
            yield f"{file}:{line}: '{name}' does not say what it does or holds: use an imperative or a noun"


def metaphors(file: str, tree: ast.Module) -> Iterator[str]:
    """Findings on names of the file, its classes and functions."""
    names = [(1, Path(file).stem)]
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    names += [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, kinds)]
    for line, name in names:
        words = re.findall(r"[A-Z]?[a-z]+", re.sub("|".join(TERMS), "", name))
        for word in words:
            if METAPHORS.fullmatch(word.lower()):
                yield f"{file}:{line}: '{word}' in {name}: see Words in CONTRIBUTING.md"


def first_lines(file: str, tree: ast.Module) -> Iterator[str]:
    """Findings on docstrings' first lines."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        text = (ast.get_docstring(node) or "").split("\n")[0] if isinstance(node, kinds) else ""
        line = getattr(node, "lineno", 1)
        if len(text) > WIDTH:
            yield f"{file}:{line}: the docstring's first line has {len(text)} columns, at most {WIDTH}"
        if isinstance(node, ast.Module) and MOULD.search(text):
            yield f"{file}:{line}: the docstring says what goes in and out: say what the module is for"


def messages(file: str, tree: ast.Module) -> Iterator[str]:
    """Findings on texts other than docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in texts:
        if id(node) not in docstrings and (phrase := DIALECT.search(node.value)):
            yield f"{file}:{node.lineno}: '{phrase[0]}' in a message: see Words in CONTRIBUTING.md"


def shared_classes(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Files by class name, of the names in several files that are not in `SHARED`."""
    files: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in SHARED:
                files[node.name].add(file)
    return {name: places for name, places in sorted(files.items()) if len(places) > 1}


def main() -> int:
    """Print findings; return the exit code."""
    trees = dict(sources(ROOT))
    checks = (locals_of, members_of, metaphors, first_lines, messages)
    findings = [line for file, tree in trees.items() for check in checks for line in check(file, tree)]
    shared = shared_classes(trees).items()
    findings += [f"class {name} is defined in {', '.join(sorted(places))}" for name, places in shared]
    print("\n".join([*findings, f"{len(findings)} findings in {len(trees)} files"]))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
