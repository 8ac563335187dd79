"""What a launch script would start, read without running it: its arrays, variables and sourced files.

Conditions and loops are not decided: behind one, a variable that it sets otherwise is `${NAME}`, and an array what it
was before with `${NAME[@]}` behind it. What else only running could tell stays as it is written, such as `$(command)`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from slime_core.errors import ConfigError

DOORS = {"train.py": 0, "train_async.py": 1}
"""slime's entry points, and how many steps their rollouts run ahead."""
UNKNOWN = re.compile(r"\$[{(]|`")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<plus>\+?)=")
_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*|\d)|\{(?P<name>[A-Za-z_]\w*|\d)(?P<rest>[^}]*)\})")
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_ARGUMENTS = re.compile(r'"?\$(?:[@*]|\{[@*].*\})"?', re.DOTALL)
_UNQUOTED = re.compile(r"(?:\$\{[^}]*\}|\$\([^)]*\)+|`[^`]*`|\S)+")
_OWN_FOLDER = re.compile(r"\$\(dirname\s+(?:--\s+)?\"?(?:\$\{BASH_SOURCE(?:\[0\])?\}|\$0|\$BASH_SOURCE)\"?\)")
_CHANGED_FOLDER = re.compile(
    r"\$\(\s*cd\s+(?:--\s+)?(.+?)\s*(?:&?>\s*/dev/null\s*(?:2>&1\s*)?)?&&\s*pwd(?:\s+-P)?\s*\)"
)
_PAIR = re.compile(r'"(\w+)"\s*:\s*"([^"]*)"')
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_CLOSING = {"(": ")", "{": "}"}
_KEYWORDS = ("export", "local", "declare", "then", "do", "set", "exec", "elif", "else")
_OPENERS = ("if", "case", "for", "while", "until", "select", "{")
_CLOSERS = {"fi": ("if",), "esac": ("case",), "done": ("for", "while", "until", "select"), "}": ("{",)}


@dataclass(slots=True)
class LaunchScript:
    """The command of a script that starts training."""

    script: Path
    door: str = ""  # train.py or train_async.py
    line: int = 0
    words: list[str] = field(default_factory=list)  # what follows it
    folders: list[Path] = field(default_factory=list)  # of PYTHONPATH, those that exist
    sources: list[Path] = field(default_factory=list)  # files that it sources
    missing: list[str] = field(default_factory=list)  # those that are not there
    variables: dict[str, str] = field(default_factory=dict)  # that it sets, in a JSON text for ray too
    cut: int = 0  # line behind the command that goes on with its arrays: a backslash is missing before it


def read_script(path: Path, environment: Mapping[str, str]) -> LaunchScript:
    """Read a script; variables that it does not set are those of ``environment``.

    Raises:
        ConfigError: CFG05 no such file, CFG06 it starts neither train.py nor train_async.py.
    """
    launch = LaunchScript(script=path)
    shell = _Shell(launch, environment)
    try:
        shell.run(path)
    except OSError as error:
        raise ConfigError(
            f"the script {path} cannot be read: {error.strerror}",
            code="CFG05",
            where=str(path),
            fix="name a launch script of slime's: slime compat check SCRIPT.sh",
        ) from error
    if not launch.door:
        raise ConfigError(
            f"{path} starts neither train.py nor train_async.py",
            code="CFG06",
            where=str(path),
            why="a launch script of slime's has `python3 train.py ...`, perhaps behind `ray job submit ... --`",
            fix="name the script that starts training",
        )
    return launch


@dataclass(slots=True)
class _Branching:
    """A condition or a loop, or a group in braces."""

    opener: str
    conditional: bool
    before: dict[str, list[str]]  # values where it begins, and each of its branches does
    changed: dict[str, list[str]] = field(default_factory=dict)  # what all branches begin with, by name


class _Shell:
    """Variables and arrays of a script while it is read."""

    def __init__(self, launch: LaunchScript, environment: Mapping[str, str]) -> None:
        self._launch, self._environment = launch, environment
        self._values: dict[str, list[str]] = {}
        self._arrays: set[str] = set()
        self._blocks: list[_Branching] = []
        self._file = launch.script

    def run(self, path: Path) -> None:
        """Read a file's commands in order."""
        outer, self._file = self._file, path
        for line, raw, joined in _commands(path.read_text(encoding="utf-8", errors="replace")):
            self._command(line, raw, joined)
        self._file = outer

    def _command(self, line: int, raw: list[str], joined: bool) -> None:
        raw = self._without_keywords(raw, joined)
        if joined:
            self._open("&&", joined)
        while raw and (match := _ASSIGNMENT.match(raw[0])):
            self._assign(match, raw[0][match.end() :])
            raw = raw[1:]
        if joined:
            self._close()
        if raw[:1] in (["source"], ["."]) and len(raw) > 1:
            self._source("".join(self.expand(raw[1])))
            return
        if self._launch.door and raw and _ARRAY.fullmatch(raw[0]):
            self._launch.cut = self._launch.cut or line
            return
        words = [word for part in raw for word in self.expand(part)]
        for at, word in enumerate(words):
            if word.startswith("PYTHONPATH="):
                self._add_folders(word.partition("=")[2])
            elif word.startswith("--runtime-env-json") or word.lstrip().startswith("{"):
                self._launch.variables |= (pairs := dict(_PAIR.findall(word)))
                self._add_folders(pairs.get("PYTHONPATH", ""))
            elif Path(word).name in DOORS and not self._launch.door and at and "python" in " ".join(words[:at]):
                self._launch.door, self._launch.line = Path(word).name, line
                self._launch.words = words[at + 1 :]
                self._launch.variables |= {name: values[0] for name, values in self._values.items() if values}

    def _without_keywords(self, raw: list[str], joined: bool) -> list[str]:
        """The command without the words before it that begin and end blocks and their branches."""
        while raw:
            word, *rest = raw
            block = self._blocks[-1] if self._blocks else None
            if block and block.opener == "case" and rest and rest[0].startswith(")"):  # word is a pattern
                self._end_branch(block)
                raw = [*filter(None, [rest[0][1:]]), *rest[1:]]
            elif word in _OPENERS:
                self._open(word, joined or word != "{")
                raw = rest[2:] if word == "case" else rest
                if word == "for" and rest[1:2] == ["in"]:
                    self._values[rest[0]] = [f"${{{rest[0]}}}"]
            elif block and block.opener in _CLOSERS.get(word, ()):
                self._close()
                raw = rest
            elif word in _KEYWORDS:
                if block and word in ("elif", "else"):
                    self._end_branch(block)
                raw = rest
            else:
                break
        return raw

    def _open(self, opener: str, conditional: bool) -> None:
        self._blocks.append(_Branching(opener, conditional, dict(self._values)))

    def _end_branch(self, block: _Branching) -> None:
        for name, values in self._values.items():
            before = block.before.get(name, [])
            if values != before:
                shared = zip(block.changed.get(name, before), values, strict=False)
                block.changed[name] = [value for value, _ in takewhile(lambda pair: pair[0] == pair[1], shared)]
        self._values = dict(block.before)

    def _close(self) -> None:
        block = self._blocks.pop()
        if not block.conditional:
            return
        self._end_branch(block)
        for name, shared in block.changed.items():
            mark = f"${{{name}[@]}}" if name in self._arrays else f"${{{name}}}"
            self._values[name] = [*(value for value in shared if value != mark), mark]

    def _assign(self, match: re.Match[str], raw: str) -> None:
        name = match["name"]
        if raw.startswith("("):
            self._arrays.add(name)
            values = [word for _, part in _words(raw[1:-1]) for word in self.expand(part)]
        else:
            values = [" ".join(self.expand(raw))]
        if match["plus"]:
            before = self._values.get(name, [])
            first = before[0] if before else self._environment.get(name, "")
            values = [*before, *values] if raw.startswith("(") else [first + values[0], *before[1:]]
        if name == "PYTHONPATH":
            self._add_folders(values[0])
        self._values[name] = values

    def _add_folders(self, *texts: str) -> None:
        for text in texts:
            for folder in map(Path, filter(None, text.split(":"))):
                if folder.is_dir() and folder not in self._launch.folders:
                    self._launch.folders.append(folder)

    def _source(self, name: str) -> None:
        place = Path(name)
        choices = [place] if place.is_absolute() else [Path.cwd() / place, self._file.parent / place]
        choices += [self._file.parent / Path(*parts) for parts in _tails(place)]
        file = next((choice for choice in choices if choice.is_file()), None)
        if file is None:
            self._launch.missing.append(name)
        elif file.resolve() not in self._launch.sources:
            self._launch.sources.append(file.resolve())
            self.run(file.resolve())

    def expand(self, raw: str) -> list[str]:
        """The words that a word becomes: quotes are removed, variables replaced."""
        if _ARGUMENTS.fullmatch(raw):  # of the script itself
            return []
        array = _ARRAY.fullmatch(raw)
        if array:
            values = self._values.get(array[1], [])
            return values if raw.startswith('"') else [word for value in values for word in _split(value)]
        text, splits = "", False
        for piece, quote in _pieces(raw):
            if quote == "'":
                text += piece
                continue
            value = self._substitute(piece)
            splits = splits or (not quote and value != piece)
            text += value
        return _split(text) if splits else [text]

    def _substitute(self, text: str) -> str:
        """Text with variables, arithmetic and the commands that are understood replaced."""
        parts, at = [], 0
        while (start := text.find("$", at)) >= 0:
            parts.append(text[at:start])
            if text.startswith("$(", start):
                end = _end(text, start + 1)
                parts.append(self._run(text[start:end]))
            elif match := _VARIABLE.match(text, start):
                end = match.end() if match["bare"] else _end(text, start + 1)
                name = match["bare"] or match["name"]
                rest = "" if match["bare"] else text[match.end("name") : end - 1]
                parts.append(self._variable(name, rest, f"${{{name}{rest}}}"))
            else:
                end = start + 1
                parts.append("$")
            at = end
        return "".join([*parts, text[at:]])

    def _variable(self, name: str, rest: str, text: str) -> str:
        values = self._values.get(name)
        value = " ".join(values) if values else self._environment.get(name)
        if rest.startswith((":-", "-")):
            return value or self._substitute(rest.lstrip(":-").strip('"'))
        if rest.startswith((":+", "+")) and not UNKNOWN.search(value or ""):
            return self._substitute(rest.lstrip(":+").replace('"', "")) if value else ""
        return text if value is None or rest else value

    def _run(self, text: str) -> str:
        """The value of ``$(...)`` or ``$((...))``; as it is written where only running tells."""
        inside = self._substitute(text[3:-2]) if text.startswith("$((") else ""
        if inside:
            numbers = {name: values[0] for name, values in self._values.items() if values}
            value = arithmetic(re.sub(r"[A-Za-z_]\w*", lambda match: numbers.get(match[0], match[0]), inside))
            return text if value is None else str(value)
        if _OWN_FOLDER.fullmatch(text):
            return str(self._file.resolve().parent)
        if match := _CHANGED_FOLDER.fullmatch(text):
            folder = "".join(self.expand(match[1]))
            return text if UNKNOWN.search(folder) else str(Path(folder).resolve())
        if match := re.fullmatch(r"\$\(seq (\d+) (\d+) (\d+)\)", text):
            first, step, last = map(int, match.groups())
            return " ".join(map(str, range(first, last + 1, step)))
        return text


def arithmetic(text: str) -> int | None:
    """The value of whole-number arithmetic; None for anything else.

    Example:
        arithmetic("3 + 89") == 92
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            result: int = _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            return result
        raise ValueError

    try:
        return value(ast.parse(text.replace("$", "").strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _split(text: str) -> list[str]:
    """The words of an unquoted value; a part that is not known has no spaces."""
    return _UNQUOTED.findall(text)


def _tails(path: Path) -> Iterator[tuple[str, ...]]:
    """Ends of a path from the longest on: `/SLIME/scripts/models/x.sh` may be `../scripts/models/x.sh` here."""
    parts = path.parts
    for start in range(1, len(parts)):
        for up in range(3):
            yield (*[".."] * up, *parts[start:])


def _commands(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Each simple command as raw words, with its line and whether one before it decides (`&&`, `||`)."""
    command: list[str] = []
    first, separators, joined = 0, "", False
    for line, word in _words(text, separators=True):
        if word in _ENDS:
            if command:
                yield first, command, joined
            command, separators = [], separators + word
        elif command:
            command.append(word)
        else:
            first, joined, separators = line, separators.rstrip("\n").endswith(("&&", "||")), ""
            command = [word]
    if command:
        yield first, command, joined


_ENDS = ("\n", ";", "&", "|")


def _words(text: str, separators: bool = False) -> Iterator[tuple[int, str]]:
    """Raw words, quotes kept, with their lines; comments are left out, and the texts of here documents."""
    at, line = 0, 1
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char == "#":
            at = (text.find("\n", at) + 1 or len(text) + 1) - 1
        elif char in _ENDS:
            if separators:
                yield line, char
            at, line = at + 1, line + (char == "\n")
        elif char.isspace():
            at += 1
        elif separators and (match := _HEREDOC.match(text, at)) and text[at : at + 3] != "<<<":
            mark = re.compile(rf"^\s*{match[1]}\s*$", re.MULTILINE).search(text, match.end())
            stop = mark.end() if mark else len(text)
            line, at = line + text.count("\n", at, stop), stop
        elif char in "<>" or re.match(r"\d?>", text[at:]):
            at += len(re.match(r"\d?[<>&|]+\d?(?:\s*[^\s;|&]+)?", text[at:])[0])  # type: ignore[index]
        else:
            end = _word_end(text, at)
            yield line, text[at:end]
            line, at = line + text.count("\n", at, end), end


def _word_end(text: str, at: int) -> int:
    """Where the word that starts at ``at`` ends."""
    start = at
    while at < len(text):
        char = text[at]
        if char in "'\"":
            at = _quote_end(text, at)
        elif char == "\\":
            at += 2
        elif char == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = _end(text, at + 1)
        elif char == "`":
            at = (text.find("`", at + 1) + 1) or len(text)
        elif char == "(" and text[start:at].endswith("="):
            at = _end(text, at)
        elif char.isspace() or char in ";|&<>" or (char in "()" and at > start):
            return at
        else:
            at += 1
    return len(text)


def _quote_end(text: str, at: int) -> int:
    """Behind the quote that closes the one at ``at``."""
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\":
            at += 1
        elif quote == '"' and text.startswith("$(", at):
            at = _end(text, at + 1) - 1
        at += 1
    return at + 1


def _end(text: str, at: int) -> int:
    """Behind the bracket that closes the one at ``at``; comments of an array are passed over."""
    opening, closing = text[at], _CLOSING[text[at]]
    depth, at = 0, at
    while at < len(text):
        char = text[at]
        if char in "'\"":
            at = _quote_end(text, at)
            continue
        if char == "#" and text[at - 1].isspace():
            at = text.find("\n", at) if text.find("\n", at) >= 0 else len(text)
            continue
        depth += (char == opening) - (char == closing)
        at += 1
        if depth == 0:
            return at
    return len(text)


def _pieces(raw: str) -> Iterator[tuple[str, str]]:
    """Parts of a word with the quote that each stands in, if any."""
    at, plain = 0, ""
    while at < len(raw):
        char = raw[at]
        if char in "'\"":
            if plain:
                yield plain, ""
            end = _quote_end(raw, at)
            inside = raw[at + 1 : end - 1]
            yield (inside if char == "'" else re.sub(r'\\(["\\$`])', r"\1", inside)), char
            at, plain = end, ""
        elif char == "\\":
            plain, at = plain + raw[at + 1 : at + 2], at + 2
        elif raw.startswith(("$(", "${"), at):
            end = _end(raw, at + 1)
            plain, at = plain + raw[at:end], end
        else:
            plain, at = plain + char, at + 1
    if plain:
        yield plain, ""
