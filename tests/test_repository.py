"""The repository says what is true: README commands and tables, links, recipes, pins, and no trace of a machine."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slime_cli.main import main
from slime_core.config.load import load_config, stages
from slime_core.config.paths import plugin_name
from slime_core.plugins import load_plugins
from slime_core.plugins.backends import tracker_keys

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
SKIPPED = {".git", "runs", "dist", "build", "wandb", "__pycache__", "node_modules"}
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ".sh", ""}
MARKDOWN = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/*/*.md", "tools/README.md"),
    *("plugins/*/README.md", "examples/*/README.md", "tools/*/README.md"),
)
PLUGIN_FOLDERS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PLUGIN_COMMANDS = {
    "compat",
    "buffer",
    "convert",
    "diagnose",
    "kernelbench",
    "models",
    "reasoning_gym",
    "report",
    "watch",
}
ONLY_LIBRARIES = {"slime_service"}
"""Packages below plugins/ that other plugins import, and that are no plugin themselves."""
RECIPES = sorted(
    path
    for pattern in ("plugins/*/src/*/recipes/*.toml", "examples/**/*.toml", "recipes/**/*.toml")
    for path in ROOT.glob(pattern)
    if path.name != "pyproject.toml"
)
TARGETS = ("demo", "dev", "check", "test", "nightly", "bench", "docs")


def files() -> list[Path]:
    """Text files that belong to the repository."""
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if (
            not hidden
            and not SKIPPED & set(parts)
            and path.suffix in TEXT
            and path.is_file()
            and path.stem != "LICENSE"
        ):
            found.append(path)
    return found


def pages() -> list[Path]:
    return sorted(path for pattern in MARKDOWN for path in ROOT.glob(pattern))


def shell_lines(page: Path) -> list[str]:
    """Commands of the ``console`` and ``sh`` blocks of a page: what follows a prompt, continued lines joined."""
    blocks = re.findall(r"```(?:console|sh)\n(.*?)```", page.read_text(), flags=re.S)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [
        line.removeprefix("$ ").strip() for line in joined.splitlines() if line.startswith(("$ ", "slime ", "make "))
    ]


def tables(page: Path) -> list[list[list[str]]]:
    """Every table of a page, as rows of cells, header and rule left out."""
    found: list[list[list[str]]] = []
    rows: list[list[str]] = []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            found.append(rows)
            rows = []
    return found


def table(page: Path, header: str) -> list[list[str]]:
    """The body of the one table whose first header cell is ``header``."""
    (rows,) = [rows for rows in tables(page) if rows[0][0] == header]
    return rows[2:]


@functools.cache
def slime(*args: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(args))
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def requirement_name(text: str) -> str:
    return re.split(r"[\[<>=!~ ;]", text, maxsplit=1)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def sub_commands() -> set[str]:
    """What `slime --help` lists under Commands."""
    done = slime("--help")
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("Commands:", 1)[1]
    return {match.group(1) for match in re.finditer(r"^  ([a-z][a-z-]*)  ", listed, flags=re.M)}


def test_every_command_of_the_documentation_exists(sub_commands: set[str]) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    commands = [shlex.split(line, comments=True) for page in pages() for line in shell_lines(page)]
    unknown = []
    for words in commands:
        known = {"make": targets, "slime": sub_commands | PLUGIN_COMMANDS}.get(words[0])
        if known is not None and len(words) > 1 and not words[1].startswith("-") and words[1] not in known:
            unknown.append(" ".join(words))
    assert [c for c in commands if c[0] == "slime"], "the documentation shows no slime command"
    assert unknown == []


def test_every_long_option_of_the_documentation_exists() -> None:
    keys = slime("config", "keys", "--json")
    assert keys.returncode == 0, keys.stderr
    flags = {f"--{name.rsplit('.', 1)[-1].replace('_', '-')}" for name in re.findall(r'"([a-z_.0-9]+)"', keys.stdout)}
    flags.add("--plugin")  # of every command that reads a config
    flags |= {f"--{name.replace('_', '-')}" for name in tracker_keys()}
    missing = []
    for line in (line for page in pages() for line in shell_lines(page) if line.startswith("slime ")):
        words = shlex.split(line, comments=True)
        path = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
        text = slime(*path[:2], "--help").stdout + slime(*path[:1], "--help").stdout
        for name in (name for word, name in itertools.pairwise(words) if word == "--plugin"):
            shown = slime("plugins", "show", name).stdout.replace("_", "-")
            text += shown.replace(f"plugin.{name.replace('_', '-')}.", "--")
        for flag in (word.split("=")[0] for word in words if word.startswith("--")):
            if flag not in flags and not re.search(rf"{flag}\b", text):
                missing.append(f"{flag} in `{line}`")
    assert missing == []


def test_the_command_table_is_what_help_lists(sub_commands: set[str]) -> None:
    (rows, *_) = [rows[2:] for rows in tables(ROOT / "docs" / "cli.md") if rows[0][0] == "command"]
    named = {match[1] for row in rows if (match := re.match(r"`slime ([a-z-]+)", row[0]))}
    assert named - PLUGIN_COMMANDS == sub_commands - PLUGIN_COMMANDS


def test_the_support_table_is_what_the_project_declares() -> None:
    rows = dict(row[:2] for row in table(ROOT / "docs" / "support.md", "part"))
    own = project(ROOT)
    fsdp = {requirement_name(text): text for text in own["optional-dependencies"]["fsdp"]}
    assert rows["Python"] == "3.11, 3.12, 3.13"
    assert own["requires-python"] == ">=3.11,<3.14"
    assert f"torch>={rows['torch'].split()[0]}" == fsdp["torch"]
    assert f"transformers>={rows['transformers'].split()[0]}" == fsdp["transformers"]


def test_the_makefile_has_the_promised_targets_and_demo_installs_no_tools() -> None:
    text = (ROOT / "Makefile").read_text()
    assert set(TARGETS) <= set(re.findall(r"^([a-z]+):", text, flags=re.M))
    demo = text[text.index("$(VENV)/.demo:") :].split("\n\n")[0]
    assert '-e ".[fsdp]"' in demo
    assert "dev" not in demo
    shown = subprocess.run(
        ["make", "-n", "-B", ".venv/.demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-e ./plugins/slime_rm_math" in shown
    assert not re.search(r"slime_(megatron|ray|sglang)", shown), "the demo needs no heavy backend"


@pytest.mark.parametrize(
    ("words", "folders"),
    [((), ["tests", "plugins", "examples"]), (("PACKAGE=sglang",), ["plugins/slime_sglang"])],
    ids=["all", "one package"],
)
def test_make_test_runs_the_whole_suite_or_that_of_a_package(words: tuple[str, ...], folders: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", "test", *words], capture_output=True, text=True, cwd=ROOT, check=True)
    (pytest_line,) = [line for line in done.stdout.splitlines() if "/bin/pytest " in line]
    assert shlex.split(pytest_line)[-len(folders) :] == folders
    assert shlex.split(pytest_line)[-len(folders) - 1] == "not gpu and not nightly"


def test_the_own_data_example_trains_as_it_is_written(tmp_path: Path, forked_slime: Any) -> None:
    page = (ROOT / "README.md").read_text()
    section = page[page.index("## Your data, your reward") : page.index("## Write a plugin")]
    found = re.findall(r"```(json|python|sh)\n(.*?)```", section, flags=re.S)
    blocks = dict(reversed(found))  # the first of each kind
    (tmp_path / "my.jsonl").write_text(blocks["json"])
    (tmp_path / "my_reward.py").write_text(blocks["python"])
    shutil.copytree(ROOT / "plugins/slime_rm_math/src/slime_rm_math/model", tmp_path / "model")
    words = shlex.split(blocks["sh"].replace("\\\n", " "))
    assert words[:2] == ["slime", "run"]
    words[words.index("--num-rollout") + 1] = "1"
    small = [
        "--init-weights",
        "random",
        "--no-apply-chat-template",
        "--rollout-batch-size",
        "2",
        "--rollout-max-response-len",
        "4",
    ]
    done = forked_slime(*words[1:], *small, "--cpu-threads", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run-0" / "final" / "model.safetensors").is_file()


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_benchmark_row_names_a_command_that_prints_it() -> None:
    rows = table(ROOT / "docs" / "benchmarks.md", "what")
    assert rows
    assert [row[0] for row in rows if not re.match(r"`(make|python tools/|slime )", row[3])] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_every_recipe_parses_and_its_plugins_accept_it(recipe: Path) -> None:
    config = load_config(recipe, [])
    for stage in stages(config):
        plugins = load_plugins(stage)
        assert plugins.names == tuple(map(plugin_name, stage.plugins))
        plugins.close()


def test_the_demo_has_a_warmup_and_a_grpo_stage() -> None:
    config = load_config(ROOT / "plugins/slime_rm_math/src/slime_rm_math/recipes/default.toml", [])
    warmup, grpo = stages(config)
    assert (warmup.train.loss_type, grpo.train.loss_type) == ("sft_loss", "policy_loss")
    assert grpo.train.advantage_estimator == "grpo"


def test_only_the_constraints_pin_and_they_pin_every_direct_dependency() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {requirement_name(line): line for line in lines if line}
    own = {f"{path.name.replace('_', '-')} @ file://${{PWD}}/plugins/{path.name}" for path in PLUGIN_FOLDERS}
    assert [
        line
        for line in pins.values()
        if line not in own and not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)
    ] == []
    declared = []
    for folder in (ROOT, *PLUGIN_FOLDERS):
        data = project(folder)
        extras = data.get("optional-dependencies", {})
        names = ("docs", "fsdp", "megatron", "ray", "serve", "sglang", "dev")
        names += ("mlflow", "otlp", "prometheus", "tensorboard", "trackers", "trackio", "wandb")
        installed = [text for name, texts in extras.items() if name in names for text in texts]
        declared += [*data["dependencies"], *installed]
    assert [text for text in declared if "==" in text.split(";")[0]] == []
    ours = {project(folder)["name"] for folder in (ROOT, *PLUGIN_FOLDERS)}
    assert {requirement_name(text) for text in declared} - set(pins) <= ours


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS, ids=lambda path: path.name)
def test_a_plugin_package_is_complete(folder: Path) -> None:
    data = project(folder)
    assert data["name"] == folder.name.replace("_", "-")
    assert data["license"] == "Apache-2.0"
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    entries = list(data.get("entry-points", {}).get("slime.plugins", {}).items())
    own = (folder.name.removeprefix("slime_"), f"{folder.name}.plugin")
    assert [(name, target.split(":")[0]) for name, target in entries] == [own] * (folder.name not in ONLY_LIBRARIES)
    assert (folder / "README.md").stat().st_size > 500
    assert list(folder.glob("tests/test_*.py"))


def test_no_file_knows_a_machine() -> None:
    homes = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files()
        if path != Path(__file__)
        for match in homes.finditer(path.read_text())
    ]
    assert found == []


def test_no_file_names_a_package_index_or_a_host() -> None:
    # Loopback, a private and a link-local address of tests, reserved names, placeholders, and a bare scheme are no hosts.
    own = r"localhost|127\.0\.0\.1|\[::1\]|10\.0\.0\.1|169\.254\.169\.254"
    allowed = re.compile(rf"({own}|([\w-]+\.)*example(\.\w+)?|[\w-]+\.invalid|HOST|h|[{{.].*)?(:.*)?")
    words = re.compile(r"(?:extra-)?index-url|find-links|trusted-host|pypi\.|pythonhosted", flags=re.I)
    found = []
    for path in files():
        if path == Path(__file__):
            continue
        text = path.read_text()
        hosts = [m.group(1).split("@")[-1] for m in re.finditer(r"https?://([^\s/\\\"'`)>]*)", text)]
        found += [f"{path.relative_to(ROOT)}: {host}" for host in hosts if not allowed.fullmatch(host)]
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in words.finditer(text)]
    assert found == []


def test_json_files_are_json() -> None:
    for path in files():
        if path.suffix == ".json":
            json.loads(path.read_text())


def test_the_second_environment_is_pinned_line_by_line_and_shares_torch_with_the_first() -> None:
    lines = [line for line in (ROOT / "constraints-sglang.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
    names = [requirement_name(line) for line in lines]
    assert len(names) == len(set(names))
    assert "sglang" in names
    assert "torch" not in names


def test_the_ci_script_runs_everything() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert script.stat().st_mode & 0o111
    assert [part for part in ("make check", "make test", ".ci/check_wheels.py") if part not in text] == []


def test_the_readme_of_tools_has_a_line_for_every_tool() -> None:
    page = ROOT / "tools" / "README.md"
    rows = [row[0].strip("`") for body in tables(page) for row in body[2:]]
    files = [path for path in page.parent.rglob("*") if path.suffix in (".py", ".sh", ".txt")]
    expected = [str(path.relative_to(page.parent)) for path in files if path.name != "__init__.py"]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_120_columns(path: Path) -> None:
    prose = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S).splitlines()
    long = [line for line in prose if len(line) > 120 and not re.match(r"\||    |#|\[[^]]*\]\S+$", line)]
    assert long == [], "python tools/docs/wrap_pages.py wraps them"


def test_the_index_links_every_page_and_every_package_once_in_four_groups() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    assert re.findall(r"^## (.*)", text, flags=re.M) == ["Start here", "Guides", "Reference", "Internals"]
    links = re.findall(r"\]\(([^)]+)\)", text)
    own = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"]
    packages = [f"../plugins/{folder.name}/README.md" for folder in PLUGIN_FOLDERS]
    assert {name: links.count(name) for name in [*own, *packages] if links.count(name) != 1} == {}
