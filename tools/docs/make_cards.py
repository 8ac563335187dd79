"""Write `docs/algorithms/`: a page a card, from the cards, the schema and the docstrings of the code that computes it.

    python tools/docs/make_cards.py            # write the pages
    python tools/docs/make_cards.py --check    # exit code 1 and the names of pages that are not up to date

Docstrings are read from the source, so neither numpy nor torch is imported.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

from wrap_pages import wrapped

from slime_cli.cards import cards, option_rows
from slime_core.algorithms import algorithms
from slime_core.algorithms.shared.card import Card

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"
MADE = "<!-- made by tools/docs/make_cards.py; edit slime_core/algorithms/NAME.py or cli/slime_cli/part_cards.py -->"


def pages() -> dict[str, str]:
    """File name to text of every page, the index first."""
    known = cards()
    return {"index.md": index(known)} | {f"{name}.md": wrapped(page(card, known)) for name, card in known.items()}


def index(known: dict[str, Card]) -> str:
    """A table of the algorithms, and one of what they share."""
    lines = [
        MADE,
        "# Algorithms",
        "",
        "An algorithm is a value of `train.advantage_estimator`. It fills what the config leaves at `auto` or 0, and",
        "every key can be set beside it. `slime config show --advantage-estimator NAME` prints its card.",
        "",
        "| algorithm | what it is | sets | when |",
        "| --- | --- | --- | --- |",
    ]
    for name, algorithm in algorithms().items():
        presets = algorithm.presets
        sets = ", ".join(f"`{key} = {value}`" for key, value in presets.items()) or "the core's defaults"
        lines.append(f"| [{name}]({name}.md) | {algorithm.title} | {sets} | {first_sentence(algorithm.advice)} |")
    lines += ["", "What they share:", "", "| part | what it is |", "| --- | --- |"]
    lines += [f"| [{name}]({name}.md) | {card.title} |" for name, card in known.items() if name not in algorithms()]
    lines += [
        "",
        "Notation: i is a rollout of a prompt's group, t a token of its response, r the reward, A the advantage, V",
        "the critic's value; pi is the policy in training, pi_old the one before the step's first optimizer step,",
        "pi_ref the reference model; sg[x] is x without its gradient. Masked tokens enter no sum, mean or ratio.",
        "",
        "How to see that they are right:",
        "",
        "- `tests/reference/`: every formula in float64 from its paper, token by token; tests compare with it",
        "- `python tools/bench/compare_losses.py`: one batch under these losses, TRL's own code and the formulas of",
        "  slime, verl and OpenRLHF, term by term, with the reason where they differ",
        "- `slime run --verify-step N`: compares the gradient of step N of a real run with a plain recomputation",
        "- [the benchmarks](../benchmarks.md): what each reached over five seeds",
    ]
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """Up to the first full stop or colon that ends a clause."""
    ends = [at for mark in (". ", ": ") if (at := text.find(mark)) > 0]
    return text[: min(ends)] if ends else text.rstrip(".")


def page(card: Card, known: dict[str, Card]) -> str:
    """One card as Markdown."""
    lines = [MADE, f"# {card.name}", "", f"{card.title}.", "", card.advice, "", "## Formula", ""]
    lines += ["| part | formula |", "| --- | --- |"]
    lines += [f"| {part} | {cell(text)} |" for part, text in card.formula.items()]
    if card.functions:
        lines += ["", "As the code says it:", ""]
        for name in card.functions:
            lines += [f"`{name.rpartition('.')[2]}`, in `{source_of(name).relative_to(ROOT)}`:", ""]
            lines += [f"> {line}".rstrip() for line in first_paragraphs(name)]
            lines += [""]
        lines.pop()
    lines += ["", "Source:", ""] + [f"- {text}" for text in card.source]
    lines += ["", "## Elsewhere", "", "| library | what it does |", "| --- | --- |"]
    lines += [f"| {who} | {cell(text)} |" for who, text in card.differs.items()]
    lines += ["", "## Options", ""]
    if any(row.preset for row in option_rows(card)):
        lines += ["The algorithm's own values are marked with a star; the others are the core's defaults.", ""]
    lines += ["| key | here | meaning |", "| --- | --- | --- |"]
    for row in option_rows(card):
        lines.append(f"| `{row.path}` | `{row.value}`{' *' if row.preset else ''} | {cell(row.text)} |")
    others = [f"[{name}]({name}.md)" for name in card.related if name in known]
    lines += ["", "See also: " + ", ".join([*others, "[all algorithms](index.md)"]) + "."]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that ends no cell and starts no emphasis or tag."""
    for mark in ("|", "*", "<"):
        text = text.replace(mark, "\\" + mark)
    return text


def source_of(function: str) -> Path:
    """The file of ``shared.kl.kl``."""
    return ROOT.joinpath("slime_core", "algorithms", *function.split(".")[:-1]).with_suffix(".py")


def first_paragraphs(function: str) -> list[str]:
    """The docstring's lines before its ``Args``, ``Returns``, ``Raises`` or ``Example``.

    Raises:
        SystemExit: there is no such function, or it has no docstring.
    """
    path, name = source_of(function), function.rpartition(".")[2]
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and (text := ast.get_docstring(node)):
            return _before_sections(text)
    raise SystemExit(f"a card names {function}, which {path.relative_to(ROOT)} does not document")


def _before_sections(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Args:", "Returns:", "Raises:", "Example:")):
            break
        lines.append(line.replace("``", "`").replace(":func:", ""))
    while lines and not lines[-1]:
        lines.pop()
    return lines


def main() -> int:
    """Write or check; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are not up to date")
    check = parser.parse_args().check
    made = pages()
    PAGES.mkdir(parents=True, exist_ok=True)
    there = {path.name: path.read_text() for path in PAGES.glob("*.md")}
    stale = sorted(name for name in {*made, *there} if made.get(name) != there.get(name))
    for name in stale:
        print(name)
        if not check:
            if name in made:
                (PAGES / name).write_text(made[name])
            else:
                (PAGES / name).unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
