"""The page in headless Chromium: plots draw, filters work, tokens have the ledger's numbers, text stays text."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_core.ledger.ledger import SqliteLedger
from slime_core.report.recorded import open_recorded
from slime_core.report.rundir import RunDir
from slime_core.types import Group, Prompt, Sample, Status
from slime_report.command import report
from slime_report.recorder import read_record

pytestmark = pytest.mark.system

MODEL = Path(__file__).parents[2] / "slime_rm_math/src/slime_rm_math/model"
RECIPE = f"""
name = "small"
plugins = ["rm_math", "report"]
[cluster]
cpu_threads = 1
[data]
tasks = [{{ name = "arithmetic" }}]
[rollout]
hf_checkpoint = "{MODEL}"
init_weights = "random"
rollout_batch_size = 4
n_samples_per_prompt = 4
num_rollout = 3
rollout_max_response_len = 6
[train]
dtype = "float32"
lr = 1e-3
num_steps_per_rollout = 2
[eval]
eval_tasks = [{{ name = "arithmetic_heldout" }}]
[plugin.rm_math]
heldout_rows = 8
"""
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
RIGHT_TO_LEFT = "שלום עולם \u202eabc"
LONG = "x" * (1 << 20)


def write_report(run: Path) -> Path:
    """The report of a run, beside it."""
    path = run.with_suffix(".html")
    report.main([str(run), "--output", str(path)], standalone_mode=False)
    return path


@pytest.fixture(scope="module")
def run(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, recorded for its report."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.toml").write_text(RECIPE)
    ended = zygote.slime(folder, "run", "recipe.toml", "--run-dir", folder / "small", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    write_report(folder / "small")
    return folder / "small"


@contextmanager
def opened(chromium: Any, path: Path, place: str = "", **options: Any) -> Iterator[Any]:
    """The page of a report; no error may appear in it, and nothing may be requested but the file."""
    context = chromium.new_context(viewport={"width": 1300, "height": 900}, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: problems.append(request.url) if request.url.split("#")[0] != f"file://{path}" else None,
    )
    page.goto(f"file://{path}{place}")
    page.wait_for_selector("body[data-ready]")
    yield page
    assert problems == []
    context.close()


def stored(run: Path) -> list[Sample]:
    """Every sample that trained, as the ledger has it."""
    with open_recorded(RunDir.open(run)) as recorded:
        return [sample for version in recorded.steps() for sample in recorded.samples(recorded.members(version))]


def test_curves_and_times_of_a_run_are_drawn_in_both_themes(run: Path, chromium: Any) -> None:
    with opened(chromium, run.with_suffix(".html"), color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        titles = page.locator("figcaption b").all_inner_texts()
        expected = {"Reward", "Evaluation: arithmetic_heldout", "Response length", "Entropy", "Log-prob gap", "Memory"}
        assert expected | {"Clipped tokens", "Staleness of trained samples", "Tokens a second"} <= set(titles)
        for figure in page.locator("figure").all():
            figure.scroll_into_view_if_needed()
            figure.locator("svg.main-svg").first.wait_for()
        steps = page.evaluate("slime.app.runs[0].steps.metrics['reward/mean'].length")
        drawn = page.evaluate("document.querySelector('.plot').data.find(trace => trace.name).y.length")
        assert (steps, drawn) == (3, 3)
        page.keyboard.press("t")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(250, 250, 249)"
        page.keyboard.press("2")
        assert "Generation" in page.locator(".shares").inner_text()
        painted = "(() => { const c = document.querySelector('canvas'); return c.getContext('2d').getImageData(0, 5, c.width, 1).data.some(v => v); })()"
        page.wait_for_function(painted)
        page.keyboard.press("4")
        page.get_by_label("Find a key").fill("num_rollout")
        assert page.locator("main tbody tr", has_text="rollout.num_rollout").inner_text().split() == [
            "rollout.num_rollout",
            "3",
        ]


def test_filters_sorting_and_keys_show_the_samples_of_the_ledger(run: Path, chromium: Any) -> None:
    samples = stored(run)
    assert len(samples) == 48
    long = [sample for sample in samples if sample.response_length >= 3]
    digit = next(char for char in samples[0].response if char != "<")
    with opened(chromium, run.with_suffix(".html"), "#samples") as page:
        counter, search = page.locator(".counter"), page.get_by_label("Filter samples")
        counter.wait_for()
        assert counter.inner_text() == "48 of 48 samples"
        search.fill("length>=3 step=1")
        assert counter.inner_text() == f"{sum(s.weight_versions[0] == 0 for s in long)} of 48 samples"
        search.fill(f"text:{digit}")
        count = sum(digit in sample.response or digit in str(sample.prompt) for sample in samples)
        page.get_by_text(f"{count} of 48 samples", exact=True).wait_for()
        search.fill("reward>nothing colour=3")
        assert "compare reward, step" in page.locator(".problem").inner_text()
        search.fill("")
        page.get_by_label("Sort by").select_option("length")
        page.get_by_label("Turn the order round").click()
        lengths = [int(text.split("·")[1].split()[0]) for text in page.locator(".sample-row span").all_inner_texts()]
        assert lengths[:5] == sorted((sample.response_length for sample in samples), reverse=True)[:5]
        page.keyboard.press("Escape")
        page.locator(".list").focus()
        for key in ("j", "j", "k", "ArrowRight"):
            page.keyboard.press(key)
        first = page.locator(".viewer h2").inner_text()
        assert first in {sample.id for sample in samples}
        page.keyboard.press("/")
        page.keyboard.type("no-such-id")
        assert counter.inner_text() == "0 of 48 samples"
        page.keyboard.press("Escape")
        page.keyboard.press("g")
        search.fill("")
        assert counter.inner_text() == "12 of 12 groups"


def test_tokens_have_the_figures_of_the_ledger_and_of_the_recorded_step(run: Path, chromium: Any) -> None:
    sample = max(stored(run), key=lambda each: each.response_length)
    record = read_record(run, sample.weight_versions[0] + 1)[sample.id]
    assert sample.rollout_log_probs is not None
    with opened(chromium, run.with_suffix(".html"), f"#samples/0/{sample.id.replace('/', '%2F')}") as page:
        page.locator(".tokens span").first.wait_for()
        assert page.locator(".tokens span").count() == sample.response_length
        place = sample.response_length - 1
        page.locator(".tokens span").nth(place).hover()
        tip = dict(line.rsplit(": ", 1) for line in page.locator(".tip").inner_text().splitlines()[1:])
        ratio = math.exp(record["policy"][place] - sample.rollout_log_probs[place])
        assert float(tip["engine log-prob"]) == pytest.approx(sample.rollout_log_probs[place], rel=1e-6)
        assert float(tip["trainer log-prob"]) == pytest.approx(record["policy"][place], rel=1e-6)
        assert float(tip["advantage"]) == pytest.approx(record["advantages"][place], rel=1e-6)
        assert float(tip["ratio trainer / engine"]) == pytest.approx(ratio, rel=1e-5)
        colours = {span.evaluate("span => span.style.background") for span in page.locator(".tokens span").all()}
        assert any("rgba(232, 135, 30" in colour for colour in colours)
        page.get_by_role("button", name="Table").click()
        column = page.locator(".tokens-table thead th").all_inner_texts().index("engine log-prob")
        cells = page.locator(f".tokens-table tbody td:nth-child({column + 1})").all_inner_texts()
        assert [float(cell) for cell in cells] == pytest.approx(sample.rollout_log_probs, rel=1e-6)


def hostile_run(path: Path) -> Path:
    """A run directory whose ledger holds an attack, a line of 1 MiB, text from right to left, turns and branches.

    Besides, figures that JSON has no word for, and a sample that was made anew.
    """
    path.mkdir()
    (path / "config.toml").write_text(
        'name = "hostile"\n[rollout]\nhf_checkpoint = "' + HOSTILE.replace("'", "") + '"\n'
    )
    (path / "metrics.jsonl").write_text(
        json.dumps(
            {
                "kind": "step",
                "version": 1,
                "stage": HOSTILE,
                "metrics": {f"reward/{HOSTILE}/mean": 1.0},
                "seconds": {"train": 1.0},
            }
        )
        + "\n"
    )
    samples = []
    for rollout, response in enumerate((HOSTILE, LONG, RIGHT_TO_LEFT)):
        sample = Sample(
            id=f"main/0-{rollout}", prompt=HOSTILE, tokens=[1], rollout_id=rollout, reward=1.0, status=Status.COMPLETED
        )
        sample.append_response([2, 3], [-0.5, -0.25], text=response, version=0)
        sample.append_response([4, 5, 6], mask=0)
        sample.append_response([7], [-1.0], version=0)
        samples.append(sample)
    branch = Sample(
        id="main/0-2.1",
        prompt=HOSTILE,
        tokens=[1],
        rollout_id=2,
        reward=0.0,
        status=Status.COMPLETED,
        metadata={"reward_terms": {HOSTILE: 0.5, "answer": "17", "right": True}, "gap": math.nan},
        label={"limit": math.inf},
    )
    branch.append_response([2, 9], [-0.5, -3.0], text=HOSTILE, version=0)
    samples.append(branch)

    def attempt(number: int, text: str) -> Group:
        sample = Sample(id="main/1-0", attempt=number, rollout_id=0, tokens=[1])
        if text:
            sample.append_response([2], [-0.5], text=text, version=0)
        return Group(prompt=Prompt(id="main/1", position=1), samples=[sample], rollouts={0: [0]})

    async def store() -> None:
        ledger = SqliteLedger(path)
        await ledger.finish(Group(prompt=Prompt(id="main/0"), samples=samples, rollouts={0: [0], 1: [1], 2: [2, 3]}))
        await ledger.finish(attempt(0, "first try"))
        await ledger.issue([attempt(1, "")])
        await ledger.finish(attempt(1, "second try"))
        await ledger.journal_step(1, "main", [*(sample.id for sample in samples), "main/1-0"])
        await ledger.trained(1)
        await ledger.close()

    with ThreadPoolExecutor(1) as pool:  # the browser's event loop runs in this thread
        pool.submit(asyncio.run, store()).result()
    return path


def test_hostile_text_a_long_line_and_right_to_left_text_are_shown_as_text(tmp_path: Path, chromium: Any) -> None:
    path = write_report(hostile_run(tmp_path / "hostile"))
    assert HOSTILE not in path.read_text()
    with opened(chromium, path, "#samples") as page:
        page.locator(".sample-row").first.wait_for()
        page.keyboard.press("j")
        page.get_by_role("button", name="Text", exact=True).click()
        texts = page.locator(".viewer > .text")
        assert texts.all_inner_texts() == [HOSTILE, HOSTILE]
        page.keyboard.press("ArrowRight")
        page.get_by_text("Show more: 1,028,576 characters follow").click()
        assert len(texts.last.inner_text()) == 120_000
        page.keyboard.press("ArrowRight")
        assert texts.last.inner_text() == RIGHT_TO_LEFT.replace("\u202e", "\\u202e")
        assert texts.last.get_attribute("dir") == "auto"
        page.get_by_role("button", name="Turns").click()
        assert page.locator(".turn.model").count() == 2
        assert page.locator(".turn.environment .text").all_inner_texts() == ["⟨4⟩⟨5⟩⟨6⟩"]
        page.locator(".branch", has_text="main/0-2.1").click()
        assert "shares 2 of 3 tokens with main/0-2" in page.locator(".branch.chosen").inner_text()
        reward = page.locator(".viewer table").first.inner_text()
        assert HOSTILE in reward
        assert '{"limit":null}' in reward
        assert "answer\t17\nright\ttrue" in reward
        page.get_by_role("button", name="Text", exact=True).click()
        attempts = page.locator(".sample-row", has_text="main/1-0")
        attempts.filter(has_text="dropped: restarted").click()
        page.get_by_text("first try").wait_for()
        attempts.filter(has_not_text="dropped").click()
        page.get_by_text("second try").wait_for()
        assert texts.first.inner_text() == ""
        assert page.locator(".branch").count() == 0
        page.get_by_label("Filter samples").fill("text:first")
        page.get_by_text("1 of 6 samples", exact=True).wait_for()
        page.locator(".list").focus()
        for key in ("1", "2", "4"):
            page.keyboard.press(key)
        page.wait_for_timeout(0)
        assert page.evaluate("window.hacked") is None


def test_two_runs_are_drawn_together_and_fit_a_narrow_screen(run: Path, tmp_path: Path, chromium: Any) -> None:
    other = hostile_run(tmp_path / "other")
    path = tmp_path / "both.html"
    report.main([str(run), str(other), "--output", str(path)], standalone_mode=False)
    with opened(chromium, path) as page:
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.keyboard.press("4")
        assert page.locator("main tbody tr", has_text="train.lr").first.inner_text().split() == [
            "train.lr",
            "0.001",
            "–",
        ]
        page.keyboard.press("3")
        page.get_by_label("Run").select_option(label="other")
        page.locator(".sample-row", has_text="main/0-1").click()
        assert page.locator(".viewer h2").is_visible()
        assert not page.locator(".chooser").is_visible()
        page.get_by_text("← List").click()
        assert page.locator(".chooser").is_visible()
