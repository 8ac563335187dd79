"""An engine in one file: any server that answers `POST /v1/completions` as vLLM does, as `rollout_engine`.

Prompts go as token ids; `return_token_ids` and `logprobs` bring the ids and log-probs that were sampled. Weights go by
a folder that the server reloads. Its draws follow from no seed, and it has no checksums of its tensors: slime compares
log-probs with the trainer's, and says that no bytes are compared.
"""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import asdict

import httpx
import numpy as np
import pydantic

from slime_core import EngineError, hookimpl
from slime_core.backends import EngineBackend, ServedEngines
from slime_core.clusters.embedded import context_len
from slime_core.config.problems import conflict
from slime_core.engines.admission import check_adapter, room
from slime_core.types import Completion, WeightRoute


class Section(pydantic.BaseModel, extra="forbid", frozen=True):
    url: str = pydantic.Field("http://127.0.0.1:8000", pattern="^https?://", description="Of the server.")
    model: str = pydantic.Field("", description="Its name there; empty is the first that the server lists.")


@hookimpl
def slime_engine():
    return [EngineBackend(name="openai_engine", section=Section, rules=rules, start=attached)]


def rules(config):
    rollout = config.rollout
    if (rollout.rollout_temperature, rollout.rollout_top_p, rollout.rollout_top_k) != (1, 1, 0):
        why, fix = "the server tells log-probs of the plain softmax alone", "--rollout-temperature 1"
        yield conflict("openai_engine trains at temperature 1", ["rollout.rollout_temperature"], why=why, fix=fix)


@asynccontextmanager
async def attached(start):
    section, rollout = Section(**start.config.table("openai_engine")), start.config.rollout
    token, timeout = os.environ.get(rollout.rollout_engine_token_env), rollout.rollout_request_timeout
    limits = httpx.Limits(max_connections=rollout.server_concurrency)
    async with httpx.AsyncClient(base_url=section.url, timeout=timeout, limits=limits) as client:
        client.headers.update({"Authorization": f"Bearer {token}"} if token else {})
        engine = OpenaiEngine(client, start)
        models = (await engine.ask("GET", "/v1/models"))["data"]
        engine.model = section.model or models[0]["id"]
        start.note(f"{section.url} serves {engine.model}")
        yield ServedEngines(engine=engine)


class OpenaiEngine:
    """Implements `protocols.Engine`; a request that is held or aborted loses what the server had made of it."""

    abilities = frozenset({"score"})

    def __init__(self, client, start):
        self.version, self.epoch, self.model = (0 if start.fixed else -1), start.epoch, ""
        self._client, self._context = client, context_len(start.config, start.folder)
        folder = str(start.run_dir.absolute() / "weights")
        self._route = WeightRoute(transport="disk", dtype=start.config.train.dtype, folder=folder)  # without checks
        self._going, self._fates = asyncio.Event(), {}  # of a request: it is to "abort", or to begin "again"
        self._going.set()

    async def ask(self, method, path, body=None):
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no answer: {error!r}", code="ENG70", where=f"{self._client.base_url}{path}") from error
        if answer.is_error:
            raise EngineError(f"{answer.status_code}: {answer.text[:500]}", code="ENG78", where=str(answer.url))
        return answer.json() if answer.content else {}

    async def _choice(self, tokens, **params):
        if self.version < 0:
            raise EngineError("no weights are loaded yet", code="ENG83", where=self.model, fix="call load first")
        body = {"model": self.model, "prompt": list(tokens), "return_token_ids": True, **params}
        choice = (await self.ask("POST", "/v1/completions", body))["choices"][0]
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") != list(tokens):
            why = "the ids that were sampled are trained on: the server must know vLLM's return_token_ids"
            raise EngineError("the server does not tell its token ids", code="ENG82", where=self.model, why=why)
        return choice

    async def generate(self, request):
        check_adapter(request.adapter, (), f"request {request.id}")
        fate = self._fates[request.id] = asyncio.get_running_loop().create_future()
        answer = asyncio.ensure_future(self._complete(request))
        try:
            await asyncio.wait({answer, fate}, return_when=asyncio.FIRST_COMPLETED)
            if not fate.done():
                return await answer
        finally:
            answer.cancel()
            del self._fates[request.id]
        return await self.generate(request) if fate.result() == "again" else self._completion(request)

    async def _complete(self, request):
        await self._going.wait()
        params = asdict(request.params) | {"max_tokens": room(request, self._context), "logprobs": 1}
        del params["max_new_tokens"]  # the other names are the server's
        choice = await self._choice(request.tokens, **params)
        log_probs = choice["logprobs"]["token_logprobs"]
        return self._completion(request, choice["token_ids"], log_probs, choice["finish_reason"], choice["text"])

    def _completion(self, request, ids=(), log_probs=(), finish="abort", text=""):
        lists = {"tokens": list(ids), "log_probs": list(log_probs), "plain_log_probs": list(log_probs)}
        versions = [self.version] * len(ids)
        return Completion(id=request.id, finish=finish, text=text, versions=versions, epoch=self.epoch, **lists)

    async def score(self, tokens, start):
        rows = (await self._choice(tokens, max_tokens=1, prompt_logprobs=0))["prompt_logprobs"]
        return np.array([rows[at][str(tokens[at])]["logprob"] for at in range(start, len(tokens))], dtype=np.float32)

    async def abort(self, ids, fate="abort"):
        for waiting in [self._fates[name] for name in ids if name in self._fates]:
            waiting.done() or waiting.set_result(fate)
        return []  # nothing is kept of them

    async def pause(self, mode):
        self._going.clear()
        await self.abort([*self._fates], "abort" if mode == "abort" else "again")

    async def resume(self):
        self._going.set()

    async def route(self, check):
        return self._route

    async def load(self, update):
        going, kwargs = self._going.is_set(), {"weights_path": update.handle["folder"]}
        await self.pause("retract")
        await self.ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        await self.ask("POST", "/reset_prefix_cache")
        self.version = update.version
        if going:
            self._going.set()

    async def fingerprints(self):
        return {}

    async def release(self, what):
        raise EngineError("the server keeps its memory", code="ENG06", where=self.model, fix="--no-colocate")

    reacquire = release
