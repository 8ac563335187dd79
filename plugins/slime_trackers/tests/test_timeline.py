"""Spans of real runs: they nest, they add up, nothing is in two places, and readers of the formats take them."""

from __future__ import annotations

import json
import resource
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slime_core.protocols import Span
from slime_core.types import StepReport
from slime_trackers.chrome_trace import ChromeTrace
from slime_trackers.prometheus import PrometheusEndpoint, legal_names
from slime_trackers.timeline import Timeline

pytestmark = pytest.mark.integration


def request(name, start, seconds, **facts):
    return Span(name="request", start=start, seconds=seconds, facts={"sample": name, **facts})


def seen(timeline, *spans):
    for span in spans:
        timeline.begin(span)
        timeline.end(span)


def events(run):
    return json.loads((run / "trace.json").read_text())


def spans_of(rows, name):
    """(name, start, duration) of a sample's spans, in microseconds from the first."""
    own = [row for row in rows if row["ph"] == "X" and row["args"].get("sample") == name]
    zero = min(row["ts"] for row in own)
    return [(row["name"], row["ts"] - zero, row["dur"]) for row in own]


def test_a_samples_spans_follow_each_other_and_lanes_are_used_again(tmp_path):
    timeline = Timeline(ChromeTrace())
    timeline.start(tmp_path, {})
    seen(timeline, request("a", 1.0, 0.5, queue=0.1, prefill=0.15))
    seen(timeline, Span(name="reward", start=1.5, seconds=0.25, facts={"samples": ["a", "b"], "group": "g"}))
    timeline.batch(SimpleNamespace(sample_ids=["a"], version=0))
    seen(timeline, Span(name="train", start=2.0, seconds=1.0))
    seen(timeline, request("c", 3.0, 0.5))
    timeline.close()
    rows = events(tmp_path)
    assert spans_of(rows, "a") == [
        ("request", 0, 500000),
        ("queue", 0, 100000),
        ("prefill", 100000, 150000),
        ("decode", 250000, 250000),
        ("reward", 500000, 250000),
        ("wait", 750000, 250000),
        ("train", 1000000, 1000000),
    ]
    assert spans_of(rows, "c") == [("request", 0, 500000)], "an engine that says no times"
    lanes = {row["args"]["sample"]: row["tid"] for row in rows if "sample" in row["args"]}
    assert lanes == {"a": 1, "b": 2, "c": 1}


def step(version):
    return StepReport(version=version, stage="main", step=version - 1, of=9, metrics={"loss": 0.0}, seconds={})


def test_lanes_of_samples_that_no_step_trains_are_used_again_and_versions_go_on_after_a_resume(tmp_path):
    row = {"kind": "step", "version": 5, "stage": "main", "step": 4, "of": 9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    timeline = Timeline(ChromeTrace(), steps=4)
    timeline.start(tmp_path, {})
    seen(timeline, Span(name="rollout", start=0.5, seconds=0.25))
    for number in range(3):  # never judged; one asks twice at once
        beside = request(f"a{number}~1", number + 1.1, 0.3)
        timeline.begin(beside)
        seen(timeline, request(f"a{number}", number + 1.0, 0.5))
        timeline.end(beside)
    timeline.batch(SimpleNamespace(sample_ids=["a0"], version=5))
    seen(timeline, Span(name="train", start=5.0, seconds=0.5), Span(name="sync", start=5.5, seconds=0.1))
    for version in (6, 7):
        timeline.write(step(version))
    timeline.write(StepReport(version=7, stage="main", step=6, of=9, metrics={"eval/held/reward": 0.0}, seconds={}))
    seen(timeline, request("late", 6.0, 0.5))
    for version in (8, 9):
        timeline.write(step(version))
    seen(timeline, request("more", 7.0, 0.5))  # behind trace_steps
    timeline.close()
    rows = [row for row in events(tmp_path) if row["ph"] == "X"]
    versions = {row["name"]: row["args"]["version"] for row in rows if "version" in row["args"] and not row["tid"]}
    assert versions == {"rollout": 5, "train": 5, "sync": 6}
    assert [row["args"]["version"] for row in rows if row["name"] == "train" and row["tid"]] == [6]
    lanes = defaultdict(set)
    for row in rows:
        lanes[row["args"].get("sample")].add(row["tid"])
    assert lanes == {None: {0}, "a0": {1, 2}, "a1": {1, 3}, "a2": {1, 4}, "late": {1}}


def test_a_timeline_that_cannot_write_takes_no_more_spans(tmp_path):
    timeline = Timeline(ChromeTrace())
    with pytest.raises(FileNotFoundError):
        timeline.start(tmp_path / "none", {})
    timeline.begin(request("a", 1.0, 0.5))
    assert not timeline._ways
    timeline = Timeline(writer := ChromeTrace())
    timeline.start(tmp_path, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        seen(timeline, *(request(f"a{number}", 1.0, 0.5) for number in range(20)))
        timeline.write(step(1))
        writer._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OSError, match="File too large"):
        timeline.write(step(2))
    seen(timeline, request("b", 1.0, 0.5))
    assert "b" not in timeline._ways


@pytest.mark.parametrize("torn", [b"", b',\n{"name":"x","args":{"a":{}', b"\n]\n", b",\n"])
def test_a_trace_goes_on_behind_its_last_whole_event(tmp_path, torn):
    first = ChromeTrace()
    first.open(tmp_path)
    first.write("loop", 0, "train", 1.0, 2.0, {"version": 0})
    first.finish()
    first.close()
    text = (tmp_path / "trace.json").read_bytes().removesuffix(b"\n]\n")
    (tmp_path / "trace.json").write_bytes(text)
    with (tmp_path / "trace.json").open("ab") as file:
        file.write(torn)
    again = ChromeTrace()
    again.open(tmp_path)
    again.write("loop", 0, "train", 2.0, 3.0, {"version": 1})
    again.finish()
    again.close()
    assert [row["args"]["version"] for row in events(tmp_path) if row["ph"] == "X"] == [0, 1]


def test_a_traced_run_has_each_sample_whole_and_a_resume_continues_the_file(tmp_path, own, forked_slime):
    run = tmp_path / "run"
    evaluation_flags = ("--eval-prompt-data", "held", f"{own.path}/my.jsonl@[0:2]", "--eval-interval", "2")
    done = forked_slime("run", *own.flags, *evaluation_flags, "--run-dir", run, "--trace", "--num-rollout", "2")
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert forked_slime("run", "--resume", run, "--num-rollout", "4").returncode == 0
    rows = events(run)
    spans = [row for row in rows if row["ph"] == "X"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["kind"] == "step"]
    for part in ("rollout", "score", "train", "sync"):
        total = sum(row["dur"] for row in spans if row["tid"] == 0 and row["name"] == part) / 1e6
        assert total == pytest.approx(sum(step["seconds"][part] for step in steps), abs=0.01), part
    evaluations = [row for row in spans if row["name"] == "evaluate"]
    assert {row["args"]["version"] for row in evaluations} == {0, 2, 4}
    samples = {row["args"]["sample"] for row in spans if "sample" in row["args"]}
    evaluation_samples = {sample for sample in samples if sample.startswith("eval/")}
    for row in (row for row in spans if row["args"].get("sample") in evaluation_samples):
        assert any(0 <= row["ts"] - one["ts"] <= one["dur"] - row["dur"] for one in evaluations), row
    samples -= evaluation_samples
    assert (len(samples), len(evaluation_samples)) == (16, 2)
    for sample in samples:
        named = dict.fromkeys(("request", "queue", "prefill", "decode", "reward", "wait", "train"), 0)
        for name, _, duration in spans_of(rows, sample):
            named[name] += duration
        assert named["request"] == named["queue"] + named["prefill"] + named["decode"], sample
        assert min(named["prefill"], named["decode"], named["train"]) > 0, sample
    lanes = defaultdict(list)
    for row in spans:
        lanes[row["pid"], row["tid"]].append((row["ts"], -row["dur"]))
    for lane in lanes.values():  # each span begins behind the one before, or inside it
        open_ends = []
        for start, minus in sorted(lane):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert all(start - minus <= end for end in open_ends)
            open_ends.append(start - minus)


def test_spans_reach_a_collector_over_otlp(tmp_path, own, forked_slime):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    flags = (*own.flags, "--run-dir", tmp_path / "run", "--num-rollout", "1")
    done = forked_slime("run", *flags, "--otlp-endpoint", f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()
    assert done.returncode == 0, done.stderr
    spans = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    roots = {span.span_id: span for span in spans if span.name == "sample"}
    assert len(roots) == 4
    children = [span for span in spans if span.parent_span_id]
    assert {"request", "prefill", "decode", "reward", "train"} <= {span.name for span in children}
    for child in children:
        root = roots[child.parent_span_id]
        assert child.trace_id == root.trace_id
        assert root.start_time_unix_nano <= child.start_time_unix_nano
        assert child.end_time_unix_nano <= root.end_time_unix_nano


SCRAPER = """
import urllib.request

import slime_core


@slime_core.hookimpl
def slime_step_done(report, ctx):
    if report.version == 2:
        with open("port.txt") as file:
            port = file.read()
        url = f"http://127.0.0.1:{port}/metrics"
        import threading
        threading.Thread(target=fetch, args=(url,)).start()


def fetch(url):
    with urllib.request.urlopen(url) as answer, open("scraped.txt", "wb") as file:
        file.write(answer.read())
"""


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_running_run_is_scraped(tmp_path, own, forked_slime):
    port = free_port()
    (tmp_path / "port.txt").write_text(str(port))
    (tmp_path / "scraper.py").write_text(SCRAPER)
    flags = (*own.flags, "--run-dir", tmp_path / "run", "--plugin", tmp_path / "scraper.py")
    done = forked_slime("run", *flags, "--prometheus-port", port, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "scraped.txt").read_text()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name, *sample.labels.values()] = sample.value
    assert values["slime_version",] == 2
    assert values["slime_metric_ledger_issued",] >= values["slime_metric_ledger_trained",] > 0
    assert values["slime_spans_total", "request"] >= 8
    assert values["slime_generated_tokens_total",] > 8
    assert values["slime_span_seconds_total", "request"] > values["slime_span_seconds_total", "request_prefill"] > 0
    assert ("slime_requests_in_flight",) in values
    assert ("slime_loop_lag_seconds",) in values
    assert {name[1] for name in values if name[0] == "slime_phase"} >= {"rollout", "train", "sync"}


def test_names_and_values_for_prometheus_are_legal(tmp_path):
    import urllib.request

    assert legal_names({"a/b": 1.0, "a b": 2.0, "ü": 3.0}) == {
        "slime_metric_a_b": "a b",
        "slime_metric_a_b_": "a/b",
        "slime_metric__": "ü",
    }
    port = free_port()
    endpoint = PrometheusEndpoint("127.0.0.1", port)
    endpoint.start(tmp_path, {})
    metrics = {"nan": float("nan"), "inf": float("inf"), "0 odd/name-x": 2.0}
    endpoint.write(StepReport(version=3, stage="main", step=0, of=4, metrics=metrics, seconds={}))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = {family.name: family.samples for family in text_string_to_metric_families(answer.read().decode())}
    assert families["slime_metric_0_odd_name_x"][0].value == 2.0
    assert families["slime_metric_inf"][0].value == float("inf")
    with pytest.raises(RuntimeError, match=r"prometheus_port \d+ .* in use; set"):
        PrometheusEndpoint("127.0.0.1", port).start(tmp_path, {})
    endpoint.close()
