"""Rollouts from other processes: with `rollout.rollout_buffer_url` this replaces `slime_generate`.

A group goes to the buffer with its prompt, the samples' ids and seeds, the sampling parameters and the address of a
loopback `/generate` before the run's engine; it comes back with tokens, log-probs, weight versions and perhaps
rewards. A reward that came along is used, the others are judged by the run's own. What failed, or did not come in
``generate_timeout``, is an infrastructure error: dropped, and never a reward of 0.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_buffer.rules import KEY
from slime_core.compat.modules import GenerateEndpoint, server
from slime_core.errors import ConfigError
from slime_core.plugins.router import INFRA
from slime_core.seeds import seed_of
from slime_core.types import Group, Sample, Status

if TYPE_CHECKING:
    from slime_buffer.exchange import Exchange
    from slime_buffer.service import models
    from slime_core.config.schema import Config
    from slime_core.context import Context

MARGIN, SHARE = 10.0, 0.1  # the buffer's part of generate_timeout ends earlier: seconds, or this share of it
PATIENCE = 300.0  # seconds that the buffer may be away


class BufferRollout:
    """The run's side of a rollout buffer; nothing is opened before the first group."""

    def __init__(self) -> None:
        self._token = secrets.token_urlsafe(32)
        self._endpoint: GenerateEndpoint | None = None
        self._exchange: tuple[asyncio.AbstractEventLoop, str, Exchange] | None = None

    async def generate(self, group: Group, ctx: Context) -> Group:
        """Ask the buffer for a group and wait for it."""
        request, limit = asked_group(group, ctx), ctx.config.rollout.generate_timeout
        seconds = limit - min(MARGIN, SHARE * limit)
        return filled(group, await self._of(ctx).make(request, self._engine(ctx), seconds))

    async def close(self) -> None:
        """Acknowledge the ledger's groups while it can still be read; close the server before the engine."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange[2], None
            await exchange.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def _of(self, ctx: Context) -> Exchange:
        from slime_buffer.exchange import Exchange, run_name

        loop, rollout = asyncio.get_running_loop(), ctx.config.rollout
        if self._exchange is None or self._exchange[:2] != (loop, rollout.rollout_buffer_url):
            token = token_of(ctx.config)
            patience = min(PATIENCE, rollout.generate_timeout)
            url = rollout.rollout_buffer_url
            self._exchange = (
                loop,
                url,
                Exchange(url, token, run_name(ctx.run_dir), ctx.recorded_groups, patience=patience),
            )
        return self._exchange[2]

    def _engine(self, ctx: Context) -> models.EngineEndpoint | None:
        from slime_buffer.service import models

        if self._endpoint is None:
            self._endpoint = server(KEY, {}, self._token)
        port = self._endpoint.port(ctx)
        return None if port is None else models.EngineEndpoint(url=f"http://127.0.0.1:{port}", token=self._token)


def token_of(config: Config) -> str:
    """The buffer's token.

    Raises:
        ConfigError: CFG09 its environment variable is not set.
    """
    name = config.rollout.rollout_buffer_token_env
    token = os.environ.get(name, "")
    if not token:
        raise ConfigError(
            f"{name} is not set",
            code="CFG09",
            where="rollout.rollout_buffer_token_env",
            why="the rollout buffer requires a token",
            fix=f"export {name}=$(cat DIR/token)   (slime buffer serve DIR names the file)",
        )
    return token


def asked_group(group: Group, ctx: Context) -> models.AskedGroup:
    """The request to the buffer."""
    from slime_buffer.service import models

    if ctx.sampling is None:
        raise RuntimeError("the context has no sampling parameters")
    params, prompt, seed = ctx.sampling, group.prompt, ctx.config.seed
    return models.AskedGroup(
        id=prompt.id,
        attempt=group.samples[0].attempt,
        task=prompt.task,
        prompt=prompt.prompt,
        tokens=list(prompt.tokens),
        label=prompt.label,
        metadata=dict(prompt.metadata),
        samples=[models.Wanted(id=s.id, seed=seed_of(seed, "sample", s.id, s.attempt)) for s in group.samples],
        sampling=models.Sampling(
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        ),
        version=ctx.version,
    )


def filled(group: Group, ended: models.Ended) -> Group:
    """The group with what came back; a rollout that did not come keeps its sample, failed."""
    came = {rollout.sample: rollout for rollout in ended.rollouts}
    done = Group(prompt=group.prompt, samples=[], rollouts={})
    for rollout, indices in group.rollouts.items():
        sample = group.samples[indices[0]]
        trajectory = came.get(sample.id)
        if trajectory is None or trajectory.failed:
            reason = trajectory.failed if trajectory is not None else ended.reason or "it did not come"
            sequences = [replace(sample, status=Status.FAILED, metadata={**sample.metadata, INFRA: reason})]
        else:
            sequences = [_filled(sample, sequence) for sequence in trajectory.sequences]
        done.rollouts[rollout] = list(range(len(done.samples), len(done.samples) + len(sequences)))
        done.samples += sequences
    return done


def _filled(sample: Sample, sequence: models.Sequence) -> Sample:
    reward = sequence.reward
    return replace(
        sample,
        tokens=list(sequence.tokens),
        response=sequence.response,
        response_length=sequence.response_length,
        loss_mask=list(sequence.loss_mask or [1] * sequence.response_length),
        rollout_log_probs=list(sequence.log_probs),
        weight_versions=list(sequence.weight_versions),
        reward=dict(reward) if isinstance(reward, dict) else reward,
        status=Status(sequence.status),
        temperature=sequence.temperature,
        metadata={**sample.metadata, **sequence.metadata},
        train_metadata={**sample.train_metadata, **sequence.train_metadata},
    )
