"""The documentation site: it builds with no broken link, loads nothing from elsewhere, and its examples run."""

import re
import subprocess
from pathlib import Path

import pytest
import site_pages

from slime_core import hookspecs

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
RUNS = {
    "grpo": (
        "options prompts sampling generate sample_done reward reward_types advantage loss batch state sinks spans step_done",
        "--advantage-estimator centred --loss-type reinforce --n-samples-per-prompt 4",
    ),
    "backends": (
        "rollout trainer cluster run_done config_rules",
        "--train-backend mine --cluster-backend mine --loss-type sft_loss --n-samples-per-prompt 2",
    ),
    "engine": ("engine reward_types", "--rollout-engine mine --rm-type exact --n-samples-per-prompt 2"),
    "filter": ("filter", "--custom-rm-path judge.py:reward --n-samples-per-prompt 4"),
}
"""Runs of one or two steps, and the hooks whose examples are loaded in each."""
OWN = "--prompt-data my.jsonl --input-key question --label-key answer"
SMALL = "--hf-checkpoint model --num-rollout 1 --rollout-batch-size 2 --rollout-max-response-len 4 --cpu-threads 1"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a warning, such as of a broken link, ends the build."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


def test_the_site_builds_without_a_warning_and_has_every_page(site):
    pages = [path.parent if path.name == "README.md" else path.with_suffix("") for path in site_pages.pages()]
    missing = [path for path in pages if not (site / path.relative_to(ROOT) / "index.html").is_file()]
    assert [path for path in missing if path.name != "index"] == []
    assert list(site.glob("docs/images/step.svg"))
    assert "slime_core.types.Sample" in (site / "docs/api/types/index.html").read_text()
    assert "asynccontextmanager" in (site / "docs/hooks/slime_engine/index.html").read_text()


def test_make_docs_counts_warnings_as_the_fixture_does():
    done = subprocess.run(["make", "--dry-run", "docs"], capture_output=True, text=True, cwd=ROOT, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "mkdocs" in line]
    assert line.endswith("-m mkdocs build --strict"), "with --quiet no warning is counted"


def test_no_page_of_the_site_loads_from_or_links_to_another_host(site):
    pages = list(site.rglob("*.html"))
    outside = {
        f"{page.relative_to(site)}: {match[0]}"
        for page in pages
        for match in re.finditer(
            r"<[^>]*\b(?:src|href|action|srcset)\s*=\s*[\"']?(?:https?:)?//[^>]*", page.read_text()
        )
    }
    styles = [
        path.name for path in site.rglob("*.css") if re.search(r"url\(\s*[\"']?(?:https?:)?//", path.read_text())
    ]
    assert len(pages) > 80
    assert outside == set()
    assert styles == []


def test_a_broken_link_ends_the_build(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[gone](gone.md) [nowhere](index.md#nowhere)\n")
    (tmp_path / "main.html").write_text("{{ page.content }}")
    validation = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), flags=re.M)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\ntheme: null\n{validation}")
    with pytest.raises(Abort, match="2 warnings"):
        build(
            load_config(str(tmp_path / "mkdocs.yml"), strict=True, theme={"name": None, "custom_dir": str(tmp_path)})
        )


@pytest.mark.parametrize("name", RUNS)
def test_the_examples_of_the_hook_pages_run_as_they_are_written(name, own, forked_slime):
    hooks, flags = RUNS[name]
    words = []
    for hook in hooks.split():
        page = site_pages.hook_pages()[f"docs/hooks/slime_{hook}.md"]
        (own.path / f"{hook}.py").write_text(re.search(r"```python\n(.*?)```", page, flags=re.S)[1])
        words += ["--plugin", f"./{hook}.py"]
    rows = [] if "prompts" in hooks else OWN.split()
    done = forked_slime("run", *words, *flags.split(), *rows, *SMALL.split(), "--run-dir", "run", cwd=own.path)
    assert done.returncode == 0, done.stderr
    assert (own.path / "run/final/model.safetensors").is_file()
    if "sinks" in hooks:
        assert re.fullmatch(r"1 0\.\d+\n", (own.path / "run/rewards.txt").read_text())


def test_every_example_of_a_hook_is_run_or_says_what_it_needs():
    run = {f"slime_{hook}" for hooks, _ in RUNS.values() for hook in hooks.split()}
    elsewhere = set(site_pages.WITHOUT_RUN) | {"slime_messages"}  # a model with a chat template: test_messages_hook
    assert run | elsewhere == set(hookspecs.HOOKS)
    assert run & elsewhere == set()


def test_navigation_follows_the_index():
    text = "## A\n\n- [Home](../README.md): x\n- [B](b.md): y\n\nC:\n\n- [D](d.md)\n- [p](../plugins/x/README.md)\n"
    assert site_pages.index_sections(text) == [{"A": [{"B": "docs/b.md"}, {"C": [{"D": "docs/d.md"}]}]}]
