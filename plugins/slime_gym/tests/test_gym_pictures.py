"""Environments of Gymnasium that are shown as pictures, read by a model that sees them."""

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from PIL import Image
from recorded import steps_of

from slime_core import ConfigError, Context, EngineError, Prompt, SamplingParams, Status
from slime_core.config.schema import Config
from slime_core.data.chat import encode
from slime_core.media.processor import MediaProcessor
from slime_core.rollout.groups import check_group, issued_ids, pending_group
from slime_core.testing.fakes import ScriptedEngine
from slime_core.testing.models import VOCAB
from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.folder import ModelFolder
from slime_gym.games import GameError, Spec
from slime_gym.options import Options
from slime_gym.plugin import Gym
from slime_gym.processes import GameProcesses, described

pytestmark = pytest.mark.integration

FAULTY = str(Path(__file__).with_name("faulty_games.py"))
LAKE = {"is_slippery": False}
PATH = ("[down]", "[down]", "fly", "[right]")


def states(moves):
    """The drawing of the lake at the start and after each move, by Gymnasium alone."""
    env = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", **LAKE)
    env.reset(seed=3)
    yield env.render()
    for move in moves:
        env.step(("left", "down", "right", "up").index(move[1:-1]))
        yield env.render()


def pixels(uri):
    """Of a data URI."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def turns_of(spec, actions):
    async def inside():
        processes = GameProcesses(1, 30.0, 8 << 30)
        try:
            episode = processes.open(spec)
            return [await episode.play(), *[await episode.play(action) for action in actions]]
        finally:
            await processes.close()

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("FrozenLake-v1", {"arguments": LAKE, "pictures": True}),
        ("SeenLake-v0", {"modules": (FAULTY,), "actions": ("left", "down", "right", "up")}),
    ],
    ids=["drawn by the environment", "observed"],
)
def test_pictures_of_states_are_gymnasiums_own(game, options):
    spec = Spec(game=game, seed=3, **options)
    start, *turns = turns_of(spec, PATH)
    assert start.text == f"You are playing {game}. Answer with one action in square brackets: " + (
        "[left], [down], [right], [up]."
    )
    shown = [turn.picture for turn in (start, *turns) if turn.picture]
    for picture, state in zip(shown, states([move for move in PATH if move != "fly"]), strict=True):
        np.testing.assert_array_equal(pixels(picture), state)
    assert [(turn.invalid, bool(turn.picture), bool(turn.text)) for turn in turns] == [
        (False, True, False),
        (False, True, False),
        (True, False, True),
        (False, True, False),
    ]
    assert described(spec)["pictures"]


def test_a_template_says_more_and_what_cannot_be_drawn_is_refused():
    cart = Spec(game="CartPole-v1", pictures=True, template="The cart is at {observation[0]:.2f}.", seed=1)
    (start,) = turns_of(cart, ())
    assert start.text.splitlines()[1].startswith("The cart is at ")
    assert pixels(start.picture).shape == (400, 600, 3)
    with pytest.raises(GameError, match="draws no pictures"):
        described(Spec(game="Room-v0", modules=(FAULTY,), arguments={"closed": "x"}, pictures=True))
    assert not described(Spec(game="FrozenLake-v1"))["pictures"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    return tiny_vision_model(path, vocab=VOCAB + "[]|_<>", context_len=2048)


def context(model, script, *, template=True, **options):
    tokenizer = ModelFolder.open(model).tokenizer()
    return Context(
        config=Config(data={"apply_chat_template": template}, rollout={"n_samples_per_prompt": 1}),
        options=Options(game="FrozenLake-v1", game_args=LAKE, **options),
        engine=ScriptedEngine(lambda request: script(request, tokenizer), vocab_size=len(tokenizer)),
        tokenizer=tokenizer,
        media=MediaProcessor.of(tokenizer),
        sampling=SamplingParams(max_new_tokens=64),
    )


def play(ctx):
    """The sample of an episode on the lake."""
    facts = {"gym": {"game": "FrozenLake-v1", "seed": 3, "players": 1, "library": "gymnasium"}}
    group = pending_group(Prompt(id="main/0", prompt="x", tokens=[1], metadata=facts), ctx.config)
    ids, gym = issued_ids(group), Gym()

    async def run():
        try:
            return await gym.slime_generate(group, ctx)
        finally:
            await gym.slime_run_done(ctx)

    done = asyncio.run(run())
    check_group(done, ids, len(ctx.tokenizer))
    return done.samples[0]


@pytest.mark.parametrize("room", [9, 2])
def test_a_sample_has_the_pictures_that_its_turns_showed_and_none_that_found_no_room(model, room):
    def script(request, tokenizer):
        if len(ctx.engine.requests) >= room:
            raise EngineError("a placeholder that the model drew", code="ENG08")
        return [*encode(tokenizer, PATH[len(ctx.engine.requests)]), tokenizer.eos_token_id], "stop"

    ctx = context(model, script, pictures=True, max_turns=len(PATH), system_prompt="Walk.")
    sample = play(ctx)
    assert sample.status is Status.TRUNCATED
    assert sample.prompt[0] == {"role": "system", "content": "Walk."}
    assert [part["type"] for part in sample.prompt[1]["content"]] == ["image", "text"]
    counts = [len(request.media.images) for request in ctx.engine.requests]
    assert counts == ([1, 2, 3, 3] if room > 2 else [1, 2])
    images = sample.multimodal_inputs["images"]
    assert len(images) == (3 if room > 2 else 2)
    arrays = ctx.media.arrays({"images": images})
    for name, array in sample.multimodal_train_inputs.items():
        np.testing.assert_array_equal(array, arrays[name])
    for picture, state in zip(images, states(PATH[:2]), strict=False):
        np.testing.assert_array_equal(pixels(picture), state)
    ctx.media.check(sample)


def test_a_model_of_text_and_prompts_without_a_template_are_refused(model):
    ctx = context(model, None, pictures=True)
    with pytest.raises(ConfigError, match="the model takes none"):
        Gym().slime_prompts("default", replace(ctx, media=None))
    with pytest.raises(ConfigError, match="no chat template is applied"):
        Gym().slime_prompts("default", context(model, None, pictures=True, template=False))
    assert Gym().slime_prompts("default", ctx).at(0).metadata["gym"]["library"] == "gymnasium"


@pytest.mark.system
def test_a_run_trains_on_the_log_probs_of_pictures_that_the_trainer_has_too(model, forked_slime, tmp_path):
    done = forked_slime(
        *("run", "--plugin", "gym", "--game", "FrozenLake-v1", "--game-args", json.dumps(LAKE), "--pictures"),
        *("--max-turns", "3", "--invalid-moves", "9", "--hf-checkpoint", model, "--run-dir", "run"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "4"),
        *("--num-rollout", "1", "--dtype", "float32", "--cpu-threads", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    ((step,), counts) = steps_of(tmp_path / "run", 1)
    assert counts["trained"] == len(step) == 4
    assert all(sample.multimodal_inputs["images"] for sample in step)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (metrics,) = (row["metrics"] for row in rows if row.get("kind", "step") == "step")
    assert metrics["train_rollout_logprob_abs_diff"] < 1e-5
