"""Pictures of the report, the live page and the terminal's view, from a real run: docs/pictures/*.png.

    python tools/docs/screenshots.py                  # runs rm_math's recipe with --plugin report first: minutes
    python tools/docs/screenshots.py runs/arithmetic-0

Each page in light and dark. `make screenshots` calls it; look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
SIZE = {"width": 1280, "height": 800}
SLIME = (sys.executable, "-m", "slime_cli.main")
TABS = ("overview", "timeline", "samples")


def take_pictures(browser: Any, run: Path, report: Path) -> None:
    """The report's tabs and the live page."""
    for theme in ("light", "dark"):
        context = browser.new_context(viewport=SIZE, color_scheme=theme)
        page = context.new_page()
        page.goto(f"file://{report}")
        page.locator(".main-svg").nth(8).wait_for()
        page.get_by_role("button", name="grpo", exact=True).click()
        for tab in TABS:
            page.evaluate(f"slime.app.show('{tab}')")
            if tab == "samples":
                show_sample(page)
            page.wait_for_timeout(1500)
            page.screenshot(path=PICTURES / f"report-{tab}-{theme}.png")
        with watched(run) as url:
            page.goto(url)
            page.locator(".main-svg").nth(8).wait_for()
            page.wait_for_timeout(1500)
            page.screenshot(path=PICTURES / f"watch-{theme}.png")
            context.close()


@contextmanager
def watched(run: Path) -> Iterator[str]:
    """The address of the live page, while it is served."""
    process = subprocess.Popen([*SLIME, "watch", str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def show_sample(page: Any) -> None:
    """A group with right and wrong answers, its tokens by advantage."""
    page.locator(".sample-row").first.wait_for()
    page.keyboard.press("g")
    page.get_by_label("Filter samples").fill("step>=510")
    page.get_by_label("Sort by").select_option("spread")
    page.get_by_label("Turn the order round").click()
    page.locator(".list").focus()
    page.keyboard.press("j")
    page.locator(".tokens span").first.wait_for()
    page.get_by_label("Colour tokens by").select_option("advantages")


async def terminal_picture(run: Path) -> str:
    """The terminal's view as SVG."""
    from slime_core.report.rundir import RunDir
    from slime_watch.terminal import WatchTerminal

    app = WatchTerminal(RunDir.open(run))
    async with app.run_test(size=(110, 34)) as pilot:
        await pilot.pause(2)
        return app.export_screenshot(title=f"slime watch {run.name} --terminal")


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    run = parser.parse_args().run
    executable = shutil.which("chromium") or sys.exit("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        if run is None:
            run = Path(folder) / "arithmetic-0"
            train = [*SLIME, "run", "--plugin", "rm_math", "--plugin", "report", "--eval-interval", "20"]
            subprocess.run([*train, "--run-dir", str(run)], check=True, env={**os.environ, "NO_COLOR": "1"})
        report = Path(folder) / "report.html"
        subprocess.run([*SLIME, "report", str(run), "--output", str(report)], check=True)
        drawing = asyncio.run(terminal_picture(run))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            take_pictures(browser, run, report)
            page = browser.new_page(viewport={"width": 1000, "height": 640})
            page.route("**", lambda route: route.abort())  # the drawing names a font on the web
            page.set_content(f"<body style='margin:0;background:#fff'>{drawing}</body>")
            page.locator("svg").first.screenshot(path=PICTURES / "terminal.png")
            browser.close()


if __name__ == "__main__":
    main()
