"""Episodes: the model says a step, the environment where to go now, until the player is out or the light is.

    play        a generate function of `slime buffer generate`: for training, by the run's engine from another process
    evaluate    the same episodes made by the run itself, for held-out problems

Both find the environment at GAME_URL, with the token in GAME_TOKEN. What it says is put into tokens once, between two
answers, and does not train; what the model said is never encoded again.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Any, Self

import httpx

from slime_buffer.generator import Away, Story, Task
from slime_buffer.service.models import Sequence
from slime_core import Context
from slime_core.data.turns import Speech
from slime_core.types import Group
from slime_core.weights.folder import ModelFolder

TRUST = ssl.create_default_context()
SECONDS = 30.0  # of one request


class Episode:
    """One episode of a problem at the environment, ended on the way out."""

    def __init__(self, problem: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._problem, self._url, self._number = problem, "", 0
        headers = {"authorization": f"Bearer {os.environ['GAME_TOKEN']}"}
        self._http = httpx.AsyncClient(
            base_url=os.environ["GAME_URL"],
            headers=headers,
            timeout=SECONDS,
            trust_env=False,
            verify=TRUST,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        try:
            self._url = f"/episodes/{(await self._call('POST', '/episodes', problem=self._problem))['episode']}"
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._call("DELETE", self._url)
        except (Away, httpx.HTTPStatusError):
            pass  # it ends by itself when nobody calls
        finally:
            await self._http.aclose()

    async def step(self, action: str) -> dict[str, Any]:
        """Play ``action``; the answer has ``observation``, ``reward`` and ``done``.

        Raises:
            Away: nobody answers. httpx.HTTPStatusError: 404 the environment has forgotten the episode.
        """
        self._number += 1
        return await self._call("POST", f"{self._url}/steps", number=self._number, action=action)

    async def _call(self, method: str, url: str, **body: Any) -> dict[str, Any]:
        """The answer to a request, which is sent once more where the first met none: a step's number is its own."""
        for last in (False, True):
            try:
                answer = await self._http.request(method, url, json=body)
            except httpx.TransportError as error:
                if last:
                    raise Away(f"the environment: {type(error).__name__} {error}") from error
                continue
            break
        return answer.raise_for_status().json()  # type: ignore[no-any-return]


async def play(task: Task) -> Sequence:
    """One episode, for the buffer."""
    story, speech = Story(task), speech_of(tokenizer())
    async with Episode(task.work.metadata["problem"]) as episode:
        while True:
            turn = await task.ask(story.tokens)
            story.say(turn)
            said = await episode.step(turn.text)
            if said["done"]:
                return story.sequence(reward=said["reward"], steps=len(story.turns))
            story.tell(speech.between(said["observation"], turn.tokens))


async def evaluate(group: Group, ctx: Context) -> Group:
    """The same for a group of an evaluation, whose samples get their reward here."""
    speech = speech_of(ctx.tokenizer)
    for sample in group.samples:
        async with Episode(sample.metadata["problem"]) as episode:
            while sample.reward is None:
                turn = await ctx.generate(sample)
                said = await episode.step(turn.text)
                if said["done"]:
                    sample.reward = said["reward"]
                else:
                    sample.append_response(speech.between(said["observation"], turn.tokens), mask=0)
    return group


def speech_of(tokenizer: Any) -> Speech:
    """Words between answers: through the chat template of a model that has one, else as they stand."""
    return Speech(tokenizer, template=bool(tokenizer.chat_template), plain="\n{{feedback}}\n")


@cache
def tokenizer() -> Any:
    """The tokenizer of the run's model, which GAME_MODEL names."""
    return ModelFolder.open(os.environ["GAME_MODEL"], init_weights="random").tokenizer()
