"""Episodes as samples: a dialogue a player, with the engine's ids alone to train on, and a baseline for each role."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from slime_core import ConfigError, Context, EngineError, Group, Prompt, Sample, SamplingParams, Status
from slime_core.algorithms.grpo import grpo
from slime_core.algorithms.shared.rewards import peers
from slime_core.config.schema import Config
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.testing.fakes import ChatTokenizer, ScriptedEngine
from slime_core.trainers.batch import make_batch
from slime_gym.options import Options
from slime_gym.plugin import Gym

pytestmark = pytest.mark.integration

TOKENIZER = ChatTokenizer()


def play(script, *, game="TicTacToe-v0", players=2, library="textarena", n=1, sampling=64, **more):
    """The group, the engine and the rewards of episodes whose answers come from ``script(request)``."""
    options = {name: more.pop(name) for name in list(more) if name in Options.model_fields}
    config = Config()
    data = config.data.model_copy(update={"apply_chat_template": True})
    rollout = config.rollout.model_copy(update={"n_samples_per_prompt": n})
    config = config.model_copy(update={"data": data, "rollout": rollout})
    engine = ScriptedEngine(script, vocab_size=len(TOKENIZER))
    ctx = Context(
        config=config,
        engine=engine,
        tokenizer=TOKENIZER,
        sampling=SamplingParams(max_new_tokens=sampling),
        options=Options(game=game, **options),
        **more,
    )
    facts = {"gym": {"game": game, "seed": 3, "players": players, "library": library}}
    prompt = Prompt(id="main/0", prompt="x", tokens=[1], metadata=facts)
    group, gym = pending_group(prompt, config), Gym()
    ids = issued_ids(group)

    async def run():
        try:
            return await gym.slime_generate(group, ctx)
        finally:
            await gym.slime_run_done(ctx)

    done = asyncio.run(run())
    check_group(done, ids, len(TOKENIZER))
    return done, engine, gym.slime_reward(done, ctx)


def says(*answers):
    """A script whose r-th request, of one rollout, is answered with the r-th text."""
    texts = list(answers)
    return lambda request: (TOKENIZER.encode(texts.pop(0)), "stop")


def text_of(sample):
    return TOKENIZER.decode(sample.tokens, skip_special_tokens=False)


def test_players_hear_each_other_and_train_on_the_ids_that_the_engine_made_and_no_other():
    script = says("<think>the middle</think>[4]", "[0]", "[3]", "[1]", "[5]")
    group, engine, rewards = play(script)
    first, second = group.samples
    assert (first.role, second.role, group.rollouts) == ("player_0", "player_1", {0: [0, 1]})
    assert (first.id, second.id, second.rollout_id) == ("main/0-0", "main/0-0.1", first.rollout_id)
    assert [reward.value for reward in rewards] == [1.0, -1.0]
    assert [reward.terms["turns"] for reward in rewards] == [3.0, 2.0]
    assert first.metadata["gym"]["turn_rewards"] == [0.0, 0.0, 1.0]
    assert second.metadata["gym"]["turn_rewards"] == [0.0, -1.0]
    assert "[Player 0] [4]" in text_of(second)
    assert "the middle" not in text_of(second)
    for sample, turns in ((first, (0, 2, 4)), (second, (1, 3))):
        tokens = np.array(sample.response_tokens)[np.array(sample.loss_mask) == 1].tolist()
        assert tokens == [token for turn in turns for token in engine.answers[turn].tokens]
        assert sample.tokens[: len(engine.requests[turns[-1]].tokens)] == engine.requests[turns[-1]].tokens
        assert sample.status is Status.COMPLETED
    tampered = replace(first, tokens=[*first.tokens[:-1], first.tokens[-1] + 1])
    assert tampered.tokens[-3:] != engine.answers[4].tokens


def test_invalid_moves_are_told_and_lose_as_soon_as_the_option_or_the_game_says():
    group, engine, rewards = play(says("?", "?"), system_prompt="Win.")
    assert group.samples[0].prompt[0] == {"role": "system", "content": "Win."}
    assert "attempted an invalid move" in text_of(group.samples[0])
    assert [(reward.value, reward.terms["invalid"]) for reward in rewards] == [(-1.0, 1.0)]
    group, *_ = play(says("<think>[4] is the middle", "<think>no, [4]"))
    assert group.samples[0].metadata["gym"]["invalid"] == 2  # reasoning that never ends is no move
    _, engine, rewards = play(says("?", "?", "[0]", "?", "?", "?"), invalid_moves=2)
    assert len(engine.requests) == 6
    assert [(reward.value, reward.terms["invalid"]) for reward in rewards] == [(1.0, 2 / 3), (-1.0, 1.0)]


def test_limits_end_an_episode_with_their_own_reward_and_one_that_breaks_is_no_reward():
    script = says("[0]", "[1]", "[2]", "[3]")
    group, _, rewards = play(script, max_turns=2, unfinished_reward=-0.5)
    assert {sample.metadata["gym"]["ended"] for sample in group.samples} == {"turns"}
    assert [sample.status for sample in group.samples] == [Status.TRUNCATED] * 2
    assert [reward.value for reward in rewards] == [-0.5, -0.5]
    assert [sample.metadata["gym"]["turn_rewards"] for sample in group.samples] == [[0.0, -0.5]] * 2

    def full(request):
        if len(request.tokens) > 900:
            raise EngineError("the prompt fills the context", code="ENG72")
        return TOKENIZER.encode("[0]"), "stop"

    lake = {"game": "FrozenLake-v1", "players": 1, "library": "gymnasium", "game_args": {"is_slippery": False}}
    group, _, rewards = play(lambda request: (TOKENIZER.encode("[left]"), "stop"), max_turns=4, **lake)
    assert group.samples[0].role == "policy"
    assert (rewards[0].value, group.samples[0].metadata["gym"]["turns"]) == (0.0, 4)
    group, _, rewards = play(full, invalid_moves=90)
    assert group.samples[0].metadata["gym"]["ended"] == "context"
    assert all(len(sample.tokens) <= 900 + 3 and sample.loss_mask[-1] == 1 for sample in group.samples)
    group, _, rewards = play(lambda request: ([], "abort"))
    assert [sample.status for sample in group.samples] == [Status.ABORTED]
    group, _, rewards = play(says("x"), game="NoGame-v0")
    assert [sample.status for sample in group.samples] == [Status.FAILED]
    assert rewards[0].kind == "infra_error"
    assert "there is no game 'NoGame-v0'" in rewards[0].reason


def test_a_fixed_opponent_leaves_one_player_to_learn_and_a_frozen_one_needs_its_engine():
    group, engine, rewards = play(
        lambda request: (TOKENIZER.encode(f"[{len(request.tokens) % 9}]"), "stop"), opponent="random", n=3
    )
    assert [sample.role for sample in group.samples] == ["player_0"] * 3
    assert len({text_of(sample) for sample in group.samples}) > 1  # each meets moves of its own
    frozen = ScriptedEngine(says("[0]", "[1]"), vocab_size=len(TOKENIZER))
    group, engine, rewards = play(says("[4]", "[3]", "[5]"), opponent="frozen", engines={"opponent": frozen})
    assert [reward.value for reward in rewards] == [1.0]
    assert (len(engine.requests), len(frozen.requests)) == (3, 2)
    with pytest.raises(ConfigError, match="no engine has the role 'opponent'"):
        play(says("[4]"), opponent="frozen")


def test_advantages_compare_a_player_with_the_same_player_of_other_episodes():
    rewards = {"player_0": (1.0, 1.0, -1.0, 0.0), "player_1": (-1.0, -1.0, 1.0, 0.0)}
    samples = []
    for rollout in range(4):
        for role, values in rewards.items():
            sample = Sample(
                id=f"g-{rollout}.{role}", role=role, rollout_id=rollout, tokens=[1], reward=values[rollout]
            )
            sample.append_response([5, 6], [-0.1, -0.1], version=0)
            samples.append(sample)
    rollouts = {rollout: [2 * rollout, 2 * rollout + 1] for rollout in range(4)}
    batch = make_batch(0, "main", [Group(prompt=Prompt(id="g"), samples=samples, rollouts=rollouts)])
    own, everybody = (
        grpo(batch.reward, *ids, batch.sample_of_token(), std=False).reshape(4, 2, 2)[:, :, 0]
        for ids in (peers(batch), peers(replace(batch, roles=[])))
    )
    assert own[:, 0] == pytest.approx([0.75, 0.75, -1.25, -0.25])  # less 0.25, the mean of player 0
    assert own[:, 1] == pytest.approx([-0.75, -0.75, 1.25, 0.25])  # less -0.25, the mean of player 1
    assert everybody == pytest.approx(np.array([[1, -1], [1, -1], [-1, 1], [0, 0]]))
