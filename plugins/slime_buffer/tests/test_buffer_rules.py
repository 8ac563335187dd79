"""Rules of the rollout buffer's keys."""

import pytest

from slime_buffer import rules
from slime_core.config.load import load_config

pytestmark = pytest.mark.unit

URL = "http://127.0.0.1:8010"


def config(tmp_path, *words):
    return load_config(None, ["--hf-checkpoint", str(tmp_path), *words])


def told(config):
    return [problem.what for problem in rules.conflicts(config)]


def of(config, url):
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"rollout_buffer_url": url})})


@pytest.mark.parametrize("url", [URL, "https://buffer.example:443", "http://" + "[::1]:9/", "http://localhost:1"])
def test_an_address_of_host_and_port_is_fine(tmp_path, url):
    assert told(of(config(tmp_path), url)) == []


@pytest.mark.parametrize(
    "url",
    [
        "buffer",
        "ftp://a.example:1",
        "http://",
        "http://user:secret@a.example:1",
        "http://a.example:1/path",
        "http://a.example:1?x=1",
        "http://a.example:0",
        "http://a.example:99999",
    ],
)
def test_anything_else_is_no_address(tmp_path, url):
    assert told(of(config(tmp_path), url)) == ["rollout_buffer_url is not an address of a rollout buffer"]


@pytest.mark.parametrize(
    "words",
    [
        ["--partial-rollout", "--over-sampling-batch-size", "64"],
        ["--custom-generate-function-path", "a.b:f"],
        ["--rollout-function-path", "a.b:f"],
    ],
    ids=["partial", "generate", "rollout"],
)
def test_rollouts_come_from_one_place(tmp_path, words):
    both = of(config(tmp_path, *words), URL)
    assert len(told(both)) == 1
    assert told(config(tmp_path, *words)) == []


def test_a_supervised_stage_may_make_its_responses_by_a_function(tmp_path):
    words = ["--rollout-function-path", "a.b:f", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1"]
    assert told(of(config(tmp_path, *words), URL)) == []


def test_a_run_does_not_start_without_the_token(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIME_BUFFER_TOKEN", raising=False)
    (problem,) = rules.incomplete(of(config(tmp_path), URL))
    assert (problem.code, problem.what) == ("CFG09", "SLIME_BUFFER_TOKEN is not set")
    monkeypatch.setenv("SLIME_BUFFER_TOKEN", "x")
    assert list(rules.incomplete(of(config(tmp_path), URL))) == []
    monkeypatch.delenv("SLIME_BUFFER_TOKEN")
    assert list(rules.incomplete(config(tmp_path))) == []
