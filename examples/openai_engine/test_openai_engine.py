"""The engine against a small server that answers as vLLM documents, with a real model behind it."""

import asyncio
import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_core import EngineError
from slime_core.backends import EngineStart
from slime_core.config.load import load_config
from slime_core.plugins.files import import_file
from slime_core.protocols import Engine
from slime_core.testing import tiny_model
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase
from slime_core.types import WeightUpdate
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.system

RECIPE = Path(__file__).with_name("recipe.toml")
attached = import_file(Path(__file__).with_name("openai_engine.py")).attached


class StandIn(ThreadingHTTPServer):
    """vLLM's answers: `/v1/models`, `/v1/completions`, and of its development mode the reloading of weights."""

    daemon_threads = True

    def __init__(self, path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.lock, self.paths, self.keys, self.folders = threading.Lock(), [], [], []
        self.knows_ids = True

    def models(self, _):
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}

    @torch.no_grad()
    def completions(self, body):
        assert body["model"] == "tiny"
        prompt, ids, log_probs, finish = body["prompt"], [], [], "length"
        ends = {*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else (self.tokenizer.eos_token_id,))}
        while len(ids) < body.get("max_tokens", 16) and finish == "length":
            logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            heat = body.get("temperature", 1.0)
            token = int(torch.multinomial(torch.softmax(logits / heat, -1), 1) if heat else logits.argmax())
            ids.append(token)
            log_probs.append(float(torch.log_softmax(logits, -1)[token]))
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            cuts = [text.index(stop) for stop in body.get("stop", ()) if stop in text]
            if token in ends or cuts:
                finish, text = "stop", text[: min(cuts, default=len(text))]
        choice = {"index": 0, "text": text, "finish_reason": finish, "stop_reason": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [str(i) for i in ids], "token_logprobs": log_probs, "text_offset": []}
        if body.get("prompt_logprobs") is not None:
            rows = torch.log_softmax(self.model(torch.tensor([prompt])).logits[0], -1)
            later = [{str(t): {"logprob": float(rows[at, t]), "rank": 1}} for at, t in enumerate(prompt[1:])]
            choice["prompt_logprobs"] = [None, *later]
        if body.get("return_token_ids") and self.knows_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": [choice]}

    def collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        self.folders.append(Path(body["kwargs"]["weights_path"]).name)
        files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
        self.model.load_state_dict({name: t for file in files for name, t in load_file(file).items()})
        return {"results": [None]}

    def reset_prefix_cache(self, _):
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        with self.server.lock:
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
            answer = getattr(self.server, self.path.rpartition("/")[2])(body)
        text = json.dumps(answer).encode() if answer is not None else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *_):
        pass

    def finish(self):
        with suppress(ConnectionError):  # the client has hung up: an abort
            super().finish()


@contextmanager
def serving(path):
    server = StandIn(path)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def server(model):
    with serving(model) as found:
        yield found


def flags(model, server):
    return ("--hf-checkpoint", model, "--openai-engine-url", server.url, "--device", "cpu", "--cpu-threads", 1)


def use(model, server, tmp_path, work, *, fixed=False):
    """``work(engine)`` with an engine that the backend has started."""
    config = load_config(RECIPE, [str(word) for word in flags(model, server)])
    folder = ModelFolder.open(model)
    start = EngineStart(config=config, folder=folder, run_dir=tmp_path, epoch=1, note=print, fixed=fixed)

    async def run():
        async with attached(start) as served:
            return await work(served.engine)

    return asyncio.run(run())


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_keeps_the_contract(check, model, server, tmp_path):
    def update(version):
        return WeightUpdate(version=version, epoch=1, transport="disk", handle={"folder": str(model)})

    def work(engine):
        assert isinstance(engine, Engine)
        return check(EngineCase(engine=engine, update=update, prompt=[3, 4, 5]))

    use(model, server, tmp_path, work)


def test_a_run_trains_by_the_server_and_says_that_no_bytes_are_compared(model, server, tmp_path, forked_slime):
    """Two steps: the server has drawn every token, and ends with the very weights that the run ends with."""
    judge, run, token = tmp_path / "judge.py", tmp_path / "run", "a-token"
    judge.write_text("async def reward(args, sample, **kw):\n    return sum(map(ord, sample.response)) % 101 / 101\n")
    few = "--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 4 --heldout-rows 2 --dtype float32 --lr 1e-2"
    words = (*flags(model, server), *few.split(), "--custom-rm-path", f"{judge}:reward", "--run-dir", run)
    done = forked_slime("run", RECIPE, *words, SLIME_SGLANG_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert "not compared byte by byte: they give no checksums of their tensors" in done.stderr
    assert f"{server.url} serves tiny" in done.stderr
    assert server.folders == ["v-0", "v-1", "v-2"]
    assert server.paths.count("/reset_prefix_cache") == 3
    assert set(server.keys) == {f"Bearer {token}"}
    final, start = load_file(run / "final" / "model.safetensors"), load_file(model / "model.safetensors")
    served = server.model.state_dict()
    assert all(torch.equal(tensor, served[name]) for name, tensor in final.items())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in final.items())
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "canary/logprob_diff_mean" in row]
    assert len(steps) == 2
    assert all(row["canary/logprob_diff_mean"] < 1e-4 and "canary/tensors" not in row for row in steps)


def test_an_evaluation_asks_the_server_for_the_weights_that_it_has(model, server, tmp_path, forked_slime):
    words = ("eval", model, RECIPE, *flags(model, server)[2:])
    done = forked_slime(*words, "--heldout-rows", 5, "--run-dir", tmp_path / "eval", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert server.paths.count("/v1/completions") >= 5
    assert server.folders == []


def test_a_server_that_tells_no_ids_is_refused(model, server, tmp_path):
    server.knows_ids = False
    with pytest.raises(EngineError, match="does not tell its token ids"):
        use(model, server, tmp_path, lambda engine: engine.score([3, 4, 5], 1), fixed=True)


def test_a_server_that_is_not_there_is_named(model, tmp_path):
    gone = SimpleNamespace(url="http://127.0.0.1:1")
    with pytest.raises(EngineError, match="no answer") as caught:
        use(model, gone, tmp_path, lambda engine: engine.score([3, 4, 5], 1))
    assert caught.value.where == f"{gone.url}/v1/models"


@pytest.mark.parametrize(
    ("flag", "code", "fix"),
    [
        (("--openai-engine-ulr", "http://x.example"), "CFG01", "openai_engine.url"),
        (("--openai-engine-url", "here"), "CFG03", ""),
        (("--rollout-temperature", "0.7"), "CFG04", "--rollout-temperature 1"),
    ],
    ids=["a key", "an address", "a temperature"],
)
def test_a_wrong_setting_is_refused_before_anything_starts(model, server, forked_slime, flag, code, fix):
    done = forked_slime("run", RECIPE, *flags(model, server), *flag, "--dry-run")
    assert done.returncode == 2
    assert f"error {code}" in done.stderr
    assert fix in done.stderr
    assert server.paths == []
