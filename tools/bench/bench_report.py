"""How long a report takes to write, how large it is, and how fast its page answers in Chromium.

    python tools/bench/bench_report.py                      # runs of 10,000 and 100,000 samples
    python tools/bench/bench_report.py --samples 10000
    python tools/bench/bench_report.py --samples 64 --tokens 131072     # responses of 64k to 192k tokens
    python tools/bench/bench_report.py --json > report.json

The runs are made here, in a folder that is removed: samples of about 120 response tokens whose ids are as frequent as
words are (Zipf's law, exponent 1.2), random log-probs, a text of as many words, terms of the reward, and a recorded
log-prob and advantage a token, in groups of 8 and steps of 512. ``write`` is `slime report` in a new process, imports
included; ``first paint`` is Chromium's own figure, from the disk. ``filter``, ``sort``, ``scroll``, ``sample`` (a
sample is opened) and ``colour`` (its tokens get another) are milliseconds from the event to the end of the frame
after it, the largest of 20; the first filter and sort are among them. ``text`` is the time until a sample's tokens are
there, the mean of 8 samples of different groups. ``write_row`` and ``read_row`` are the processor's milliseconds for
one sample of the ledger: encoded into a segment, without the sync of the disk, and decoded from its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.durable import replace_file
from slime_core.ledger.codec import decode, encode
from slime_core.ledger.schema import TRAINED, connect
from slime_core.ledger.segments import Segments
from slime_core.types import Batch, Sample, Status
from slime_report.recorder import FOLDER, record_of

GROUP, STEP, TOKENS, PROMPT = 8, 512, 120, 60
WORDS = np.array("the of a sum is and two so step then answer we get x y = + 3 7 12".split())  # noqa: SIM905
INSERT = (
    "INSERT INTO samples (id, attempt, state, position, place, rollout, version, newest, ticks, step, reward, tokens, "
    f"response_length, segment, offset, length, crc32) VALUES (?, 0, {TRAINED}, {', '.join('?' * 14)})"
)
FRAME = """async (act) => {
    const start = performance.now();
    act();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - start;
}"""
ACTIONS = {
    "filter": "i => { const s = slime.samples.state.search; s.value = "
    "['reward>0.5', 'step=7', 'length>100 reward<0.3', 'status:truncated', '-3', ''][i % 6]; "
    "s.dispatchEvent(new Event('input')); }",
    "sort": "i => { const s = document.querySelector('.chooser select'); s.value = ['reward', 'length', 'logprob', "
    "'order'][i % 4]; s.dispatchEvent(new Event('change')); }",
    "scroll": "i => { const s = slime.samples.state.list; s.scrollTop = s.scrollHeight * ((i * 7) % 20) / 20; }",
    "sample": "i => slime.samples.open((i * 4801) % slime.samples.state.table.count)",
    "colour": "i => slime.viewer.nextColour()",
}
TEXT = """async (i) => {
    const table = slime.samples.state.table, places = table.id.map((_, at) => at);
    const inside = places.filter((at) => table.pages[table.group[at]] >= 0), at = inside[(i * 9) % inside.length];
    const start = performance.now(), shown = () => document.querySelector(".viewer h2")?.textContent === table.id[at];
    slime.samples.open(at);
    while (!shown() || !document.querySelector(".tokens")) await new Promise((done) => setTimeout(done, 2));
    return performance.now() - start;
}"""


def make_run(path: Path, samples: int, tokens: int, seed: int = 0) -> None:
    """Write a run directory of ``samples`` samples."""
    path.mkdir()
    (path / "config.toml").write_text('name = "bench"\n[train]\nlr = 1e-6\n')
    (path / FOLDER).mkdir()
    rng = np.random.default_rng(seed)
    steps = -(-samples // STEP)
    names = [f"metric/{number}" for number in range(50)]
    with (path / "metrics.jsonl").open("w") as file:
        for version in range(1, steps + 1):
            metrics = dict(zip(names, rng.random(50).tolist())) | {"reward/mean": version / steps, "reward/std": 0.3}
            metrics |= {"reward/min": 0.0, "reward/max": 1.0, "tokens/response": STEP * tokens}
            row = {"kind": "step", "version": version, "stage": "main", "step": version - 1, "of": steps}
            seconds = {"rollout": 3.0, "train": 2.0, "sync": 0.1}
            file.write(json.dumps({**row, "metrics": metrics, "seconds": seconds}) + "\n")
    segments, database = Segments(path / "segments"), connect(path / "ledger.sqlite")
    database.execute("BEGIN")
    for first in range(0, samples, STEP):
        own = [make_sample(number, tokens, rng) for number in range(first, min(samples, first + STEP))]
        version = first // STEP + 1
        for number, sample in enumerate(own, first):
            place = segments.append(encode(sample))
            figures = (number // GROUP, number % GROUP, number, version - 1, version - 1, tokens, version)
            sizes = (sample.reward, len(sample.tokens), sample.response_length)
            database.execute(INSERT, (sample.id, *figures, *sizes, *place))
        replace_file(
            path / FOLDER / f"step-{version:06d}", zlib.compress(record_of(make_batch(version - 1, own, rng)), 1)
        )
    database.execute("COMMIT")
    database.close()
    segments.close()


def make_sample(number: int, tokens: int, rng: np.random.Generator) -> Sample:
    """One sample of random tokens; its reward is random too."""
    length = int(rng.integers(tokens // 2, tokens * 3 // 2))
    sample = Sample(
        id=f"main/{number // GROUP}-{number % GROUP}",
        prompt=" ".join(rng.choice(WORDS, PROMPT).tolist()),
        tokens=make_ids(PROMPT, rng),
        reward=float(rng.random()),
        status=Status.TRUNCATED if number % 9 == 0 else Status.COMPLETED,
        metadata={"reward_terms": {"correct": float(number % 2), "format": float(rng.random())}},
    )
    log_probs = (-rng.exponential(0.7, length)).astype(np.float32).tolist()
    text = " ".join(rng.choice(WORDS, length).tolist())
    sample.append_response(make_ids(length, rng), log_probs, text=text, version=number // STEP)
    return sample


def row_times(path: Path, tokens: int) -> dict[str, float]:
    """Processor milliseconds of a sample's record, written and read, the least of five."""
    sample, segments = make_sample(0, tokens, np.random.default_rng(1)), Segments(path)
    times: dict[str, list[float]] = {"write_row_ms": [], "read_row_ms": []}
    for _ in range(5):
        start = time.process_time()
        place = segments.append(encode(sample))
        middle = time.process_time()
        decode(segments.read(place))
        times["write_row_ms"].append(1e3 * (middle - start))
        times["read_row_ms"].append(1e3 * (time.process_time() - middle))
    segments.close()
    return {name: min(values) for name, values in times.items()}


def make_ids(count: int, rng: np.random.Generator) -> list[int]:
    """Token ids of a vocabulary of 49,152."""
    return ((rng.zipf(1.2, count) * 7919) % 49_152).tolist()  # type: ignore[no-any-return]


def make_batch(version: int, samples: list[Sample], rng: np.random.Generator) -> Batch:
    """A step's columns, as the recorder meets them."""
    lengths = [sample.response_length for sample in samples]
    policy = np.concatenate([sample.rollout_log_probs or [] for sample in samples]) + rng.normal(0, 0.01, sum(lengths))
    advantages = np.repeat(rng.normal(0, 1, len(samples)), lengths)
    none = np.zeros(0)
    return Batch(
        version=version,
        sample_ids=[sample.id for sample in samples],
        tasks=[],
        group=none,
        rollout=none,
        reward=none,
        tokens=none,
        offsets=none,
        loss_mask=none,
        response_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        columns={"policy": policy, "advantages": advantages},
    )


def measure(samples: int, tokens: int, browser: Any) -> dict[str, float]:
    """Figures of a run of ``samples`` samples."""
    with tempfile.TemporaryDirectory(prefix="bench-report-", dir=Path.cwd()) as folder:
        run, page_file = Path(folder) / "bench-0", Path(folder) / "report.html"
        make_run(run, samples, tokens)
        rows = row_times(Path(folder) / "rows", tokens)
        command = [sys.executable, "-m", "slime_cli.main", "report", str(run), "--output", str(page_file)]
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        processor = after.children_user + after.children_system - before.children_user - before.children_system
        figures = {"write_seconds": time.perf_counter() - start, "write_processor_seconds": processor}
        figures["megabytes"] = page_file.stat().st_size / 1e6
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"file://{page_file}")
        page.wait_for_selector("body[data-ready]")
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        figures["first_paint_ms"] = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        start = time.perf_counter()
        page.evaluate("slime.app.show('samples')")
        page.wait_for_selector(".sample-row")
        figures["open_samples_ms"] = 1e3 * (time.perf_counter() - start)
        figures["text_ms"] = float(np.mean([page.evaluate(TEXT, number) for number in range(8)]))
        for name, action in ACTIONS.items():
            times = [page.evaluate(f"({FRAME})(() => ({action})({number}))") for number in range(20)]
            figures[f"{name}_ms"] = max(times)
        page.close()
    return figures | rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, action="append", help="Of a run; default: 10,000 and 100,000.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="Of a response, about.")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    executable = shutil.which("chromium") or sys.exit("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        results = {count: measure(count, chosen.tokens, browser) for count in chosen.samples or [10_000, 100_000]}
        browser.close()
    if chosen.json:
        print(json.dumps(results, indent=1))
        return
    for count, figures in results.items():
        print(f"{count} samples: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
