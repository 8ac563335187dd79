"""Pages and navigation of the documentation site: a hook of MkDocs, which `make docs` runs (mkdocs.yml).

Pages keep their place in the repository, so that a link means the same on the site and on a code host: README.md,
docs/, and the READMEs of packages and examples. A linked file that is not a page, such as a recipe, is copied. Made
here: a page for every hook, and the API pages, which mkdocstrings fills from docstrings. docs/index.md is the table of
contents.

Example: python -m mkdocs build --strict
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/*/*.md", "tools/README.md"),
    *("plugins/*/README.md", "examples/*/README.md", "tools/*/README.md"),
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
API = {
    "types": "Data types: what hooks receive and return.",
    "protocols": "Interfaces between packages, and what hooks register.",
    "context": "A hook's context.",
    "hookspecs": "Every hook, as it is specified.",
    "backends": "Engines, trainers and clusters of plugins.",
    "errors": "The error tree.",
    "testing.models": "Small models for tests.",
    "testing.fakes": "Engines and tokenizers for tests of plugins.",
    "testing.plugins": "The contract suite of plugins.",
    "testing.contracts": "The contract suites of engines and trainers.",
}
"""Public modules of slime_core with an API page, and what each holds."""
CHOSEN = {
    "slime_reward_types": "--rm-type exact",
    "slime_advantage": "--advantage-estimator centred",
    "slime_loss": "--loss-type reinforce",
    "slime_engine": "--rollout-engine mine",
    "slime_trainer": "--train-backend mine",
    "slime_cluster": "--cluster-backend mine",
    "slime_rollout": "--loss-type sft_loss",
    "slime_messages": "--apply-chat-template",
}
"""Flags with which a run uses a hook's example."""
MEGATRON_RUN = "slime run --plugin ./mine.py --train-backend megatron --hf-checkpoint ./model"
WITHOUT_RUN = {
    "slime_checks": "slime doctor --plugin ./mine.py",
    "slime_command": "slime mine greet    # once it is a package: slime plugins new mine",
    "slime_recipes": "slime run --plugin ./mine.py    # with recipes/default.toml beside it",
    "slime_model_bridge": MEGATRON_RUN,
    "slime_megatron_init": MEGATRON_RUN,
    "slime_megatron_before_log_prob": MEGATRON_RUN,
    "slime_megatron_before_train_step": MEGATRON_RUN,
}
"""Commands that use an example, where a run with the embedded backends does not."""
Nav = list[dict[str, Any]]


def pages() -> list[Path]:
    """Every page of the repository."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def links(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to or shows."""
    for _, target, _ in LINK.findall(without_code(page.read_text())):
        path = (page.parent / target).resolve()
        if path.is_relative_to(ROOT) and path.is_file():
            yield path


def without_code(text: str) -> str:
    """The text with its blocks of code left out."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what MkDocs collected in docs/ by the repository's pages, the files they link to, and the made pages."""
    from mkdocs.structure.files import File

    for file in [file for file in files if Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]:
        files.remove(file)
    assets = ROOT.glob("docs/theme/*.css")
    linked = [target for page in pages() for target in links(page)]
    code = [path for places in implementations().values() for path in places]
    for path in sorted({*pages(), *linked, *code, *assets}):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    for name, text in {**hook_pages(), **api_pages()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a link to a folder, which a site cannot show, into text."""
    here = (ROOT / page.file.src_uri).parent

    def unlinked(match: re.Match[str]) -> str:
        return match[1] if (here / match[2]).is_dir() else match[0]

    return LINK.sub(unlinked, markdown)


def navigation() -> Nav:
    """Home, the sections of docs/index.md, hooks, packages and the API."""
    return [
        {"Home": "README.md"},
        *index_sections((ROOT / "docs" / "index.md").read_text()),
        {"Hooks": ["docs/hooks/index.md", *(f"docs/hooks/{name}.md" for name in hook_names())]},
        {
            "Packages": [
                {title(path): str(path.relative_to(ROOT))} for path in sorted(ROOT.glob("plugins/*/README.md"))
            ]
        },
        {"API": [{f"slime_core.{name}": f"docs/api/{name}.md"} for name in API]},
    ]


def index_sections(text: str) -> Nav:
    """The sections of docs/index.md, with the first link of each item; a line that ends with a colon opens a group.

    Example: index_sections("## A\\n\\nB:\\n\\n- [C](c.md): d\\n") == [{"A": [{"B": [{"C": "docs/c.md"}]}]}]
    """
    sections: Nav = []
    entries: list[Any] = []
    for line in text.splitlines():
        if line.startswith("## "):
            sections.append({line[3:]: (top := [])})
            entries = top
        elif sections and re.fullmatch(r"\w[\w ]*:", line):
            top.append({line[:-1]: (entries := [])})
        elif line.startswith("- ") and (match := LINK.search(line)) and not match[3]:
            path = (
                (ROOT / "docs" / match[2]).relative_to(ROOT) if not match[2].startswith("../") else Path(match[2][3:])
            )
            if path.parts[0] != "plugins" and path != Path("README.md"):
                entries.append({match[1]: children(path)})
    return sections


def children(page: Path) -> str | list[str]:
    """A page, or a folder's index with its other pages."""
    if page.name != "index.md":
        return str(page)
    others = sorted(path for path in (ROOT / page).parent.glob("*.md") if path.name != "index.md")
    return [str(page), *(str(path.relative_to(ROOT)) for path in others)]


def title(page: Path) -> str:
    """The first heading of a page."""
    return page.read_text().split("\n", 1)[0].removeprefix("# ")


def api_pages() -> dict[str, str]:
    """A page for each public module."""
    return {
        f"docs/api/{name}.md": f"# slime_core.{name}\n\n{text}\n\n::: slime_core.{name}\n"
        for name, text in API.items()
    }


def hook_names() -> list[str]:
    """Every hook, in the order of the specification."""
    from slime_core.hookspecs import HOOKS

    return list(HOOKS)


def hook_pages() -> dict[str, str]:
    """A page for every hook, and their index."""
    from slime_cli.plugins import hook_rows

    places = implementations()
    rows = hook_rows()
    index = ["# Hooks", "", "What a plugin may implement. [Plugins](../plugins.md) says how they work together.", ""]
    index += ["| hook | kind | what it does |", "| --- | --- | --- |"]
    index += [f"| [{row['name']}]({row['name']}.md) | {row['kind']} | {row['text'].splitlines()[0]} |" for row in rows]
    return {"docs/hooks/index.md": "\n".join(index) + "\n"} | {
        f"docs/hooks/{row['name']}.md": hook_page(row, places.get(row["name"], [])) for row in rows
    }


def hook_page(row: dict[str, Any], places: list[Path]) -> str:
    """A hook's sentence, its example as a file, the command that uses it, and where the repository implements it."""
    name = row["name"]
    sentence, _, example = row["text"].partition("\n\n")
    replaces = ", ".join(f"`{flag}`" for flag in row["replaces"])
    own = "--hf-checkpoint ./model --prompt-data my.jsonl --input-key question --label-key answer"
    run = " ".join(["slime run --plugin ./mine.py", *filter(None, [CHOSEN.get(name)]), "\\\n   ", own])
    lines = [f"# {name}", "", sentence, "", f"- Signature: `{row['signature']}`"]
    lines += [f"- Kind: {row['kind']}{', may be async' if row['may_await'] else ''}"]
    lines += [f"- In place of slime's {replaces}"] * bool(replaces)
    lines += [
        "",
        "## Example",
        "",
        "`mine.py`, a complete plugin, which the tests of slime load and run:",
        "",
        "```python",
        example.rstrip(),
        "```",
        "",
    ]
    lines += ["```console", f"$ {WITHOUT_RUN.get(name, run)}", "$ slime plugins check ./mine.py", "```", ""]
    if places:
        lines += ["## In this repository", ""]
        lines += [f"- [`{path.relative_to(ROOT)}`](../../{path.relative_to(ROOT)})" for path in places]
    lines += ["", f"Types: [slime_core.hookspecs](../api/hookspecs.md#slime_core.hookspecs.{name})."]
    return "\n".join(lines) + "\n"


def implementations() -> dict[str, list[Path]]:
    """Files of packages, examples and the core in which a hook is implemented."""
    places: dict[str, list[Path]] = {}
    for pattern in ("examples/**/*.py", "plugins/*/src/**/plugin.py", "slime_core/builtin/__init__.py"):
        for path in sorted(ROOT.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                    "hookimpl" in ast.unparse(mark) for mark in node.decorator_list
                ):
                    places.setdefault(node.name, []).append(path)
    return places
