"""`slime watch` on whole runs: its page in Chromium, its server's refusals, its view on a terminal of 80 columns."""

import fcntl
import http.client
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pyte
import pytest

from slime_core.report.history import read_lines

pytestmark = pytest.mark.system

WAIT = 60  # seconds until a test gives up
COMMAND = [sys.executable, "-m", "slime_cli.main", "watch"]
GATED = '''
import asyncio, pathlib

GATE = pathlib.Path(__file__).with_name("gate")


async def reward(args, sample, **kwargs):
    """Rewards of a step are given once the gate has its number."""
    while int(GATE.read_text() or 0) <= sample.group_index // 2:
        await asyncio.sleep(0.02)
    return sum(map(ord, sample.response)) % 7 / 7
'''
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u202eevil"


def until(condition, seconds=WAIT):
    """Wait for a condition, and return what it returned."""
    clock, end = threading.Event(), time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        clock.wait(0.05)
    return value


@contextmanager
def serving(run, *flags):
    """The page's URL while `slime watch RUN` serves it."""
    process = subprocess.Popen([*COMMAND, run, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=WAIT)


@pytest.fixture(scope="module")
def hostile_run(small, tmp_path_factory):
    """A finished run, with texts in it that a page or a terminal might obey."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(small.run, run)
    evaluation = {"kind": "eval", "version": 4, "name": HOSTILE, "metrics": {"reward/mean": 0.5}, "seconds": {}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation) + "\n" + '{"kind": "step", "vers')
    with (run / "log" / "run.log").open("a") as file:
        file.write(f"2026-11-27T10:00:00 \x1b[2J{HOSTILE}\n")
    return run


def wait_in(page, expression, argument=None):
    """Wait until an expression holds in a page; playwright's own waiting needs `eval`, which the page's policy forbids."""
    until(lambda: page.evaluate(expression, argument))


@pytest.fixture
def open_page(small, chromium):
    """Open an address in a page; what its console said and what it requested are lists of the page's own.

    The small run is made first: it has an event loop in this thread, and then the browser has one.
    """
    pages = []

    def go(url):
        page = chromium.new_page()
        pages.append(page)
        page.problems, page.requests = [], []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("dialog", lambda dialog: (page.problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        return page

    yield go
    for page in pages:
        page.close()


def test_the_page_of_a_run_grows_while_it_trains_and_asks_nobody_else(own, forked_slime, open_page, tmp_path):
    (own.path / "judge.py").write_text(GATED)
    gate, run = own.path / "gate", tmp_path / "run"
    gate.write_text("1")
    done = []
    flags = (*own.flags, "--run-dir", run)
    training = threading.Thread(target=lambda: done.append(forked_slime("run", *flags)))
    training.start()
    try:
        until(lambda: (run / "config.toml").exists())
        with serving(run) as (_, url):
            page = open_page(url)
            steps = "slime.app.runs[0].steps.version.length"
            drawn = "n => document.querySelector('.plot')?.data?.at(-1).x.length === n"
            wait_in(page, f"{steps} === 1")
            wait_in(page, drawn, 1)
            wait_in(page, "document.getElementById('state').textContent.startsWith('live: rollout')")
            gate.write_text("3")
            wait_in(page, drawn, 3)
            gate.write_text("9")
            wait_in(page, drawn, 4)
            wait_in(page, "document.getElementById('state').textContent === 'the run has ended: finished'")
            assert page.text_content(".badge") == "finished"
            page.click("[data-tab=samples]")
            page.get_by_text("16 of 16 samples").wait_for()
            page.keyboard.press("j")
            sample = next(row for row in read_lines(run / "samples.jsonl") if row["version"] == 4)
            page.fill("input[type=search]", f"text:{sample['prompt']}")
            page.get_by_text("of 16 samples").wait_for()
            page.locator(".list [role=option]").first.click()
            page.locator(".viewer").get_by_text(sample["prompt"], exact=True).wait_for()
            assert page.problems == []
            base = url.partition("?")[0]
            assert [each for each in page.requests if not each.startswith((base, "data:", "blob:"))] == []
    finally:
        gate.write_text("9")
        training.join(WAIT)
    assert done[0].returncode == 0, done[0].stderr


def test_hostile_texts_of_a_run_are_text(hostile_run, open_page):
    with serving(hostile_run) as (_, url):
        page = open_page(url)
        wait_in(page, "document.getElementById('state').textContent.startsWith('the run has ended')")
        assert page.get_by_text(f"Evaluation: {HOSTILE}").count() == 1
        page.wait_for_selector(".plot .main-svg")
        assert (page.problems, page.locator("img[src=x]").count()) == ([], 0)
        assert page.evaluate("slime.app.runs[0].steps.version") == [1, 2, 3, 4]
        page.evaluate("document.querySelector('.plot').marked = true; slime.app.update({ runs: slime.app.runs })")
        assert page.evaluate("document.querySelector('.plot').marked"), "curves grow in place"
        page.evaluate("slime.app.runs[0].notices.push('grown'); slime.app.update({ runs: slime.app.runs })")
        assert page.get_by_text("grown").count() == 1, "what is new is drawn, though the run is the same object"


def test_the_server_refuses_strangers_and_ends_when_the_run_goes(hostile_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(hostile_run, run)
    with serving(run) as (process, url):
        address, token = urlsplit(url).netloc, url.partition("token=")[2]

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection(address, timeout=WAIT)
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            response.body = response.read()
            connection.close()
            return response

        good = f"Bearer {token}"
        refusals = {
            401: [
                ask("/"),
                ask("/?token=wrong"),
                ask("/?token="),
                ask("/updates", Authorization="Bearer x"),
                ask("/x"),
            ],
            403: [
                ask(f"/?token={token}", Host=name) for name in ("evil.example", "127.0.0.1.evil.example", "evil:80")
            ],
            404: [ask(path, Authorization=good) for path in ("/metrics.jsonl", "/../config.toml", "//", "/log/")],
            405: [ask("/", method, Authorization=good) for method in ("POST", "PUT", "HEAD", "OPTIONS")],
        }
        assert {status: {answer.status for answer in answers} for status, answers in refusals.items()} == {
            status: {status} for status in refusals
        }
        page = ask(f"/?token={token}", Host="localhost:8000")  # as through ssh -L
        assert page.status == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert (page.headers["cache-control"], page.headers["referrer-policy"]) == ("no-store", "no-referrer")
        assert token.encode() not in page.body
        assert [ask(path).status for path in ("/samples", "/groups?first=0&count=9", "/findings")] == [401] * 3
        table = json.loads(ask("/samples", Authorization=good).body)
        assert len(table["columns"]["id"]) == 26
        strange = ("/groups?first=x&count=-1", "/groups", "/updates?after=1.x", f"/groups?first={'9' * 5000}&count=1")
        assert [ask(path, Authorization=good).status for path in strange] == [200] * 4
        update = json.loads(ask("/updates?after=", Authorization=good).body)
        assert update["run"]["steps"]["version"] == [1, 2, 3, 4]
        other = subprocess.run([*COMMAND, run, "--port", str(urlsplit(url).port)], capture_output=True, text=True)
        assert (other.returncode, "CFG04" in other.stderr) == (2, True)
        shutil.rmtree(run)
        until(lambda: ask("/updates?after=", Authorization=good).status == 410)
        _, said = process.communicate(timeout=WAIT)
        assert (process.returncode, "STO111" in said) == (7, True)


class Terminal:
    """A command on a terminal of its own, and what its screen shows."""

    def __init__(self, *command, size=(80, 24), **env):
        self.screen, self.raw = pyte.Screen(*size), b""
        self._stream = pyte.ByteStream(self.screen)
        pid, self._fd = pty.fork()
        if pid == 0:
            own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
            os.execve(command[0], [str(word) for word in command], {**own, **env})
        self.pid = pid
        self.resize(*size)

    def resize(self, columns, lines):
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys):
        os.write(self._fd, keys.encode())

    def _read(self):
        while select.select([self._fd], [], [], 0.05)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # its other end is closed
                return
            self.raw += data
            self._stream.feed(data)
            if not data:
                return

    def shows(self, words):
        """Wait until the screen has the words; returns its lines."""

        def look():
            self._read()
            return words in "\n".join(self.screen.display)

        try:
            until(look)
        except AssertionError:
            pytest.fail(f"not shown: {words}\n" + "\n".join(self.screen.display))
        return self.screen.display

    def end(self):
        """Wait for the command's end; returns its exit code."""

        def ended():
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return (os.waitstatus_to_exitcode(status),) if pid else None

        (code,) = until(ended)
        self._read()
        os.close(self._fd)
        return code


@pytest.fixture
def terminal():
    terminals = []

    def start(*command, **options):
        terminals.append(Terminal(*command, **options))
        return terminals[-1]

    yield start
    for each in terminals:
        with suppress(ProcessLookupError):
            os.kill(each.pid, 9)


def test_a_terminal_of_80_columns_shows_curves_samples_notes_and_times_without_colour(hostile_run, terminal):
    view = terminal(*COMMAND, hostile_run, "--terminal", NO_COLOR="1", TERM="xterm-256color")
    lines = view.shows("grad_norm")
    assert lines[0].startswith("run  finished  grpo step 3/3  4/4")
    assert "reward reward/mean" in lines[2]
    assert "evaluation eval/held" in lines[2]
    assert re.search("[\u2801-\u28ff]", "".join(lines[3:8])), "a curve is drawn"
    assert lines[-1].startswith("1 curves  2 samples")
    assert r"\x1b[2J<img src=x" in "\n".join(lines), "the newest sentence, not obeyed"
    view.press("2")
    assert re.search(r"best grpo/\d+-\d+: reward [\d.]+ ", "\n".join(view.shows("best grpo/")))
    view.press("p")
    view.shows("2 of 4")
    view.press("3")
    view.shows("version 4: ")
    view.press("4")
    view.shows("time, last 4 steps")
    view.resize(30, 8)
    view.shows("too small")
    view.resize(100, 40)
    view.press("1n")
    view.shows("advantages/abs_mean")
    assert not re.search(rb"\x1b\[[0-9;]*[34]8;[25];", view.raw), "no colour"
    view.press("q")
    assert view.end() == 0
    assert b"\x1b[?1049l" in view.raw, "the screen from before is back"


def test_where_there_is_no_terminal_or_no_run_it_prints_lines_or_says_so(small, tmp_path, terminal):
    lines = subprocess.run([*COMMAND, small.run, "--terminal"], capture_output=True, text=True)
    assert (lines.returncode, lines.stderr) == (0, "")
    assert "grpo step 3/3  reward" in lines.stdout
    assert "eval held at step 4" in lines.stdout
    missing = subprocess.run([*COMMAND, tmp_path / "none", "-t"], capture_output=True, text=True)
    assert (missing.returncode, "CFG05" in missing.stderr) == (2, True)

    early = tmp_path / "early"  # a run that was killed before its first step
    early.mkdir()
    shutil.copy(small.run / "config.toml", early)
    view = terminal(*COMMAND, early, "--terminal", TERM="xterm-256color")
    view.shows("no step is finished yet")
    shutil.rmtree(early)
    assert view.end() == 7
    assert b"STO111" in view.raw
