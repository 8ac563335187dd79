"""What every Engine, Trainer and cluster must do, as checks that run against any implementation.

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
    def test_my_engine_keeps_the_contract(check):
        asyncio.run(check(EngineCase(engine=MyEngine(), update=my_update, prompt=[1, 2, 3])))

A check raises AssertionError and says which promise was broken.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config.schema import Config
from slime_core.durable import sha256_of
from slime_core.errors import EngineError, SlimeError
from slime_core.protocols import Engine, Role, RunComponents, Trainer
from slime_core.types import (
    AdapterUpdate,
    ArrayRef,
    Batch,
    GenerateRequest,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    Status,
    WeightUpdate,
)

PATIENCE = 60.0  # seconds until a call that never returns counts as a deadlock
ROUNDING = 0.5  # log-probs of a small model are moved by less where it is computed in bfloat16


@dataclass(slots=True, kw_only=True)
class EngineCase:
    """An engine before its first load, the update that gives it a version, and a prompt it understands."""

    engine: Engine
    update: Callable[[int], WeightUpdate]
    prompt: list[int]
    max_new_tokens: int = 12
    adapters: Callable[[], Mapping[str, AdapterUpdate]] | None = None  # two, for an engine that takes them so

    def request(self, name: str, **changes: object) -> GenerateRequest:
        """A request for the case's prompt; the seed follows from the name."""
        request = GenerateRequest(id=name, tokens=list(self.prompt), params=self.params(), seed=sum(name.encode()))
        return replace(request, **changes)  # type: ignore[arg-type]

    def params(self, count: int = 0) -> SamplingParams:
        """For ``count`` tokens (0: the case's), greedy where the engine's draws do not follow the seed."""
        temperature = 1.0 if self.seeded else 0.0
        return SamplingParams(max_new_tokens=count or self.max_new_tokens, ignore_eos=True, temperature=temperature)

    @property
    def seeded(self) -> bool:
        """Whether the engine repeats a draw for the same seed."""
        return "per_sample_seed" in self.engine.abilities


@dataclass(slots=True, kw_only=True)
class TrainerCase:
    """A trainer before its first ``begin``, the stage, a batch with advantages, and a folder to write into."""

    trainer: Trainer
    stage: Config
    batch: Batch
    folder: Path


def sample_group(position: int = 0, *, fan_out: bool = False) -> Group:
    """A finished group of two rollouts with an ArrayRef; with ``fan_out`` the second has two samples."""
    prompt = Prompt(id=f"main/{position}", position=position, prompt="1+1=", tokens=[1, 2, 1])
    samples = []
    for name, rollout in [("0", 0), ("1", 1), *([("1.1", 1)] if fan_out else [])]:
        sample = Sample(id=f"{prompt.id}-{name}", prompt=prompt.prompt, tokens=list(prompt.tokens))
        sample.append_response([3, 4], log_probs=[-0.5, -0.25], version=0, text="2\n")
        sample.append_response([5], mask=0, text="tool")
        sample.group_index, sample.rollout_id = position, position * 2 + rollout
        sample.reward, sample.status = float(rollout), Status.COMPLETED
        sample.rollout_routed_experts = ArrayRef(segment="x.seg", offset=0, dtype="int16", shape=(5, 2), crc32=1)
        samples.append(sample)
    rollouts = {position * 2: [0], position * 2 + 1: [1, 2] if fan_out else [1]}
    return Group(prompt=prompt, samples=samples, rollouts=rollouts)


@dataclass(slots=True, kw_only=True)
class ClusterCase:
    """A way to start a cluster's components, again and again, their stage, and the ids of its living processes."""

    start: Callable[[], AbstractAsyncContextManager[RunComponents]]
    stage: Config
    alive: Callable[[], Sequence[int]]


EngineCheck = Callable[[EngineCase], Awaitable[None]]
TrainerCheck = Callable[[TrainerCase], Awaitable[None]]
ClusterCheck = Callable[[ClusterCase], Awaitable[None]]


async def engine_refuses_to_generate_before_its_first_load(case: EngineCase) -> None:
    """There is no silent random model."""
    try:
        await case.engine.generate(case.request("a"))
    except EngineError:
        return
    raise AssertionError("generate answered although no weights were loaded")


async def engine_stamps_the_version_it_serves(case: EngineCase) -> None:
    """Every token says which weights made it, and lists agree in length."""
    for version in (3, 4):
        await case.engine.load(case.update(version))
        done = await case.engine.generate(case.request("a"))
        assert case.engine.version == version, f"serves {case.engine.version} after {version} was loaded"
        assert set(done.versions) == {version}, f"stamped {set(done.versions)} under {version}"
        counts = {len(done.tokens), len(done.log_probs), len(done.plain_log_probs), len(done.versions)}
        assert counts == {case.max_new_tokens}, f"lists of lengths {counts}"
        assert done.finish == "length", done.finish


async def engine_ends_at_a_stop_token_that_is_the_last_allowed(case: EngineCase) -> None:
    """A response that has its end is whole, also where there was no room for one more token."""
    await case.engine.load(case.update(1))
    tokens = (await case.engine.generate(case.request("a"))).tokens
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in tokens[: count - 1]:
            continue
        params = replace(case.params(count), stop_token_ids=(tokens[count - 1],), ignore_eos=count % 2 == 0)
        done = await case.engine.generate(case.request("a", params=params))
        assert done.tokens == tokens[: len(done.tokens)], "a stop token changed what was drawn before it"
        if len(done.tokens) == count:  # without ignore_eos it may end sooner
            assert done.finish == "stop", f"ended by {done.finish} at stop token {count} of {count} allowed"


async def engine_repeats_itself_for_the_same_seed(case: EngineCase) -> None:
    """Draws are a function of the seed and the position: alone or among others, once or twice.

    Without the ability per_sample_seed only greedy samples repeat themselves.
    """
    await case.engine.load(case.update(1))
    alone = await case.engine.generate(case.request("a"))
    among = await asyncio.gather(*(case.engine.generate(case.request(name)) for name in "xay"))
    assert among[1].tokens == alone.tokens, "neighbours changed a sample"
    if "batch_invariant" in case.engine.abilities:
        assert among[1].log_probs == alone.log_probs, "neighbours changed log-probs"
    if not case.seeded:
        return
    other = await case.engine.generate(case.request("a", seed=12345))
    assert other.tokens != alone.tokens, "the seed changes nothing"


async def engine_keeps_partial_tokens_of_an_abort(case: EngineCase) -> None:
    """Aborted tokens are returned, and continuing from them gives what would have come."""
    await case.engine.load(case.update(1))
    case.max_new_tokens = 48
    whole = await case.engine.generate(case.request("a"))
    running = asyncio.create_task(case.engine.generate(case.request("a")))
    for _ in range(3):
        await asyncio.sleep(0)
    await case.engine.abort(["a"])
    part = await running
    assert part.tokens == whole.tokens[: len(part.tokens)], "an abort changed tokens already drawn"
    if part.finish != "abort":
        return
    remaining = case.max_new_tokens - len(part.tokens)
    rest = await case.engine.generate(
        case.request("a", tokens=[*case.prompt, *part.tokens], params=case.params(remaining), kept=len(part.tokens))
    )
    assert part.tokens + rest.tokens == whole.tokens, "continuing after an abort drew other tokens"


async def engine_computes_nothing_while_paused(case: EngineCase) -> None:
    """`keep` pauses requests until resume; `abort` ends them."""
    await case.engine.load(case.update(1))
    await case.engine.pause("keep")
    waiting = asyncio.create_task(case.engine.generate(case.request("a")))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done, "a paused engine answered"
    await case.engine.resume()
    assert (await asyncio.wait_for(waiting, PATIENCE)).finish == "length"
    case.max_new_tokens = 48
    waiting = asyncio.create_task(case.engine.generate(case.request("b")))
    await asyncio.sleep(0)
    await case.engine.pause("abort")
    assert (await asyncio.wait_for(waiting, PATIENCE)).finish in ("abort", "length")
    await case.engine.resume()


async def engine_gives_memory_back_and_takes_it_again(case: EngineCase) -> None:
    """release, reacquire, load: it serves the right weights afterwards. An engine without the ability refuses."""
    await case.engine.load(case.update(1))
    if "release" not in case.engine.abilities:
        try:
            await case.engine.release({"kv"})
        except EngineError:
            return
        raise AssertionError("memory was given back without the ability release")
    before = await case.engine.generate(case.request("a"))
    await case.engine.pause("abort")
    await case.engine.release({"kv", "weights"})
    await case.engine.reacquire({"weights"})
    await case.engine.load(case.update(1))
    await case.engine.reacquire({"kv"})
    await case.engine.resume()
    after = await case.engine.generate(case.request("a"))
    assert after.tokens == before.tokens, "samples changed after release and reacquire"


async def engine_scores_what_it_generates(case: EngineCase) -> None:
    """`score` gives the plain log-probs that `generate` reported."""
    if "score" not in case.engine.abilities:
        return
    await case.engine.load(case.update(1))
    done = await case.engine.generate(case.request("a", params=replace(case.params(), temperature=1.0)))
    scored = await case.engine.score([*case.prompt, *done.tokens], len(case.prompt))
    assert scored.shape == (len(done.tokens),), scored.shape
    np.testing.assert_allclose(scored, done.plain_log_probs, atol=2e-2, err_msg="score and generate disagree")


async def engine_tells_fingerprints_that_follow_the_weights(case: EngineCase) -> None:
    """Every tensor has a checksum, the same for the same weights; a route without checks says that none has."""
    await case.engine.load(case.update(1))
    route, first = await case.engine.route("all"), await case.engine.fingerprints()
    if route is not None and not route.checks:
        assert first == {}, "checksums that the route does not request are compared with nothing"
        return
    assert first, "no fingerprints"
    await case.engine.load(case.update(1))
    assert await case.engine.fingerprints() == first, "the same weights have other fingerprints"


async def engine_computes_each_request_with_its_adapter(case: EngineCase) -> None:
    """Side by side as alone, under adapters that follow updates of adapters alone; an unknown name is refused."""
    update = case.update(1)
    if case.adapters is not None:
        update.adapters = case.adapters()
    await case.engine.load(update)
    try:
        await case.engine.generate(case.request("a", adapter="unknown"))
    except EngineError:
        pass
    else:
        raise AssertionError("a request for an unknown adapter was served")
    if case.adapters is None:
        return
    assert "adapters" in case.engine.abilities, "it takes adapters without the ability"
    first, second = update.adapters
    requests = {name: case.request(name, adapter=name, seed=7) for name in ("", first, second)}
    alone = {name: await case.engine.generate(request) for name, request in requests.items()}
    assert alone[""].tokens == alone[first].tokens, "no adapter's name is not the first adapter"
    assert alone[first].tokens != alone[second].tokens, "both adapters are one"
    among = await asyncio.gather(*map(case.engine.generate, requests.values()))
    assert [done.tokens for done in among] == [done.tokens for done in alone.values()], "adapters mix in a batch"
    sums, route = await case.engine.fingerprints(), await case.engine.route("all")
    assert route is not None, "there is no route that says that the engine has the base"
    assert not route.base, "an engine that has the base would be sent it again"
    swapped = {first: update.adapters[second], second: update.adapters[first]}
    await case.engine.load(replace(update, version=2, tensors={}, adapters=swapped))
    after = await case.engine.generate(requests[second])
    assert after.tokens == alone[first].tokens, "an update of adapters alone did not arrive"
    assert set(after.versions) == {2}, f"stamped {set(after.versions)} under 2"
    moved = await case.engine.fingerprints()
    for name in update.adapters[first].tensors:
        same = moved[f"{second}/{name}"] == sums[f"{first}/{name}"]
        assert same, f"{name} of {second} has another checksum than it had as {first}'s"


async def trainer_publish_returns_before_any_engine_loads(case: TrainerCase) -> None:
    """Waiting for the engine inside publish would deadlock: NCCL needs both sides."""
    await case.trainer.begin(case.stage)
    update = await asyncio.wait_for(case.trainer.publish(5), PATIENCE)
    assert update.version == 5, update.version
    assert update.tensors or update.handle is not None, "the update carries nothing"


async def trainer_scores_every_response_token(case: TrainerCase) -> None:
    """Columns are flat over the batch's response tokens, finite, and asking twice changes nothing."""
    await case.trainer.begin(case.stage)
    first = await case.trainer.score(case.batch, frozenset({"policy"}))
    again = await case.trainer.score(case.batch, frozenset({"policy"}))
    values = first["policy"]["log_probs"]
    assert values.shape == case.batch.loss_mask.shape, values.shape
    assert np.isfinite(values).all(), "log-probs are not finite"
    assert (values == again["policy"]["log_probs"]).all(), "scoring changed the model"


async def trainer_scores_in_both_dtypes(case: TrainerCase) -> None:
    """One of them is the dtype of compute; the other differs by rounding alone. Either may be left out."""
    await case.trainer.begin(case.stage)
    roles: frozenset[Role] = frozenset({"policy", "float32", "bfloat16"})
    scores = {role: columns["log_probs"] for role, columns in (await case.trainer.score(case.batch, roles)).items()}
    policy = scores.pop("policy")
    apart = {role: float(np.abs(policy - values).max()) for role, values in scores.items()}
    assert not apart or min(apart.values()) == 0, apart
    assert max(apart.values(), default=0.0) < ROUNDING, apart


async def trainer_step_changes_what_it_publishes(case: TrainerCase) -> None:
    """A step that moved nothing, or an update that carries old weights, would train in vain."""
    await case.trainer.begin(case.stage)
    before = await _published(case, 0)
    metrics = await case.trainer.step(case.batch)
    after = await _published(case, 1)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    if before:
        assert any((before[name] != after[name]).any() for name in before), "a step moved no weight"


async def trainer_verifies_a_step_and_changes_nothing(case: TrainerCase) -> None:
    """The gradient agrees with the slow way, and the weights stay as they are."""
    await case.trainer.begin(case.stage)
    before = await _published(case, 0)
    report = await case.trainer.verify(case.batch)
    after = await _published(case, 0)
    assert report["gradient_error"] <= report["limit"], report
    assert report["loss_error"] <= report["limit"], report
    assert any(name.startswith("gradient_error/") for name in report), report
    assert all((before[name] == after[name]).all() for name in before), "verifying moved a weight"


async def trainer_restores_what_it_saved(case: TrainerCase) -> None:
    """A step that begins before the state is on disk changes nothing of it, and comes again bit for bit after it."""
    await case.trainer.begin(case.stage)
    await case.trainer.step(case.batch)
    before = await case.trainer.fingerprint()
    await case.trainer.save(case.folder)
    first = await case.trainer.step(case.batch)
    marks = await case.trainer.saved()
    want = await _published(case, 1)
    after = await case.trainer.fingerprint()
    await case.trainer.restore(case.folder)
    assert await case.trainer.fingerprint() == before, "what was restored is not what was saved"
    again = await case.trainer.step(case.batch)
    published = await _published(case, 2)
    assert first["loss"] == again["loss"], (first["loss"], again["loss"])
    assert all((want[name] == published[name]).all() for name in want), "weights differ after restore"
    assert await case.trainer.fingerprint() == after != before, "the fingerprint does not follow the weights"
    present = {file.relative_to(case.folder).as_posix() for file in case.folder.rglob("*") if file.is_file()}
    assert marks.keys() == present, (sorted(marks), sorted(present))
    assert all(sha256_of(case.folder / name) == mark for name, mark in marks.items()), "a mark is not of its file"


async def trainer_saves_one_state_after_another(case: TrainerCase) -> None:
    """A second save waits for the first; each folder holds the state of its own moment."""
    await case.trainer.begin(case.stage)
    prints = []
    for number in range(2):
        await case.trainer.step(case.batch)
        prints.append(await case.trainer.fingerprint())
        await case.trainer.save(case.folder.with_name(f"{case.folder.name}-{number}"))
    await case.trainer.saved()
    for number, want in enumerate(prints):
        await case.trainer.restore(case.folder.with_name(f"{case.folder.name}-{number}"))
        assert await case.trainer.fingerprint() == want, f"save {number} holds another state"


async def _published(case: TrainerCase, version: int) -> dict[str, NDArray[Any]]:
    """Copies of what the trainer publishes, in float32 where it is a tensor."""
    tensors = (await case.trainer.publish(version)).tensors
    return {n: np.array(t.detach().float().cpu().numpy() if hasattr(t, "detach") else t) for n, t in tensors.items()}


async def cluster_serves_the_weights_of_its_trainer(case: ClusterCase) -> None:
    """Its parts work together: its engines load what the trainer publishes."""
    async with case.start() as run:
        async with run.devices.training():
            await run.trainer.begin(case.stage)
        async with run.devices.syncing():
            route = await run.engines.route("all")
            await run.engines.load(await run.trainer.publish(3, route))
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        done = await run.engines.generate(GenerateRequest(id="a", tokens=[1, 2], params=params, seed=7))
        assert done.versions == [3] * 4, f"tokens of versions {done.versions} under 3"
        assert max(done.tokens) < run.vocab_size, f"token {max(done.tokens)} of a vocabulary of {run.vocab_size}"


async def cluster_takes_everything_down_and_starts_again(case: ClusterCase) -> None:
    """An error inside the block stays itself, and leaves nothing that a later start would meet."""
    try:
        async with case.start():
            raise ArithmeticError("of the block")
    except ArithmeticError:
        pass
    assert not (remaining := case.alive()), f"processes {remaining} are left"
    async with case.start() as run:
        await run.ledger.counts()


async def cluster_says_that_a_process_is_gone(case: ClusterCase) -> None:
    """Calls of killed processes raise slime's own errors, which say that they were lost."""
    async with case.start() as run:
        if not (pids := case.alive()):
            return  # all of it lives in this process
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for call in (run.trainer.begin(case.stage), run.engines.resume()):
            (answer,) = await asyncio.wait_for(asyncio.gather(call, return_exceptions=True), PATIENCE)
            assert isinstance(answer, SlimeError), f"a call of a killed process ended with {answer!r}"
            assert answer.lost, f"{answer} does not say that it was lost"
    assert not (remaining := case.alive()), f"processes {remaining} are left"


ENGINE_CHECKS: tuple[EngineCheck, ...] = (
    engine_refuses_to_generate_before_its_first_load,
    engine_stamps_the_version_it_serves,
    engine_ends_at_a_stop_token_that_is_the_last_allowed,
    engine_repeats_itself_for_the_same_seed,
    engine_keeps_partial_tokens_of_an_abort,
    engine_computes_nothing_while_paused,
    engine_gives_memory_back_and_takes_it_again,
    engine_scores_what_it_generates,
    engine_tells_fingerprints_that_follow_the_weights,
    engine_computes_each_request_with_its_adapter,
)
TRAINER_CHECKS: tuple[TrainerCheck, ...] = (
    trainer_publish_returns_before_any_engine_loads,
    trainer_scores_every_response_token,
    trainer_scores_in_both_dtypes,
    trainer_step_changes_what_it_publishes,
    trainer_verifies_a_step_and_changes_nothing,
    trainer_restores_what_it_saved,
    trainer_saves_one_state_after_another,
)
CLUSTER_CHECKS: tuple[ClusterCheck, ...] = (
    cluster_serves_the_weights_of_its_trainer,
    cluster_takes_everything_down_and_starts_again,
    cluster_says_that_a_process_is_gone,
)
