"""Episodes as samples: one a player that the model plays, each a dialogue with the game, of one rollout.

    turn -> what the player has not read, as ids -> ctx.generate -> the answer as an action -> turn ...

Ids and log-probs of answers are the engine's; what the game says has mask 0. The issued sample is the player's that
answers first, the others are its siblings. What happened is in ``metadata["gym"]``; :func:`rewards` reads it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from slime_core import ConfigError, Context, EngineError, Group, Prompt, Reward, Sample, Status
from slime_core.algorithms.shared.rewards import BY_TURN
from slime_core.data.chat import encode, render
from slime_core.data.turns import CLOSE, Speech, unspecial
from slime_core.media.placing import bare
from slime_core.media.references import inputs_of
from slime_core.plugins.boundary import together
from slime_core.rollout.groups import sibling
from slime_core.seeds import seed_of
from slime_core.types import Message
from slime_gym.games import GameError, GameTurn, Spec

if TYPE_CHECKING:
    from slime_core.types import Completion
    from slime_gym.options import Options
    from slime_gym.processes import Episode, GameProcesses

GYM = "gym"
"""Key of a prompt's and a sample's metadata."""
LIMITS = ("turns", "context")  # ends that are not the game's
OPPONENT = "opponent"  # role of a frozen engine


@dataclass(slots=True, kw_only=True)
class Player:
    """One player that the model or a frozen engine plays."""

    sample: Sample
    context: Context  # of its engine
    learns: bool
    answer: list[int] = field(default_factory=list)  # its last
    response: str = ""  # up to there
    rewards: list[float] = field(default_factory=list)  # by turn
    invalid: int = 0  # moves
    media: tuple[Any, Any] = (None, None)  # of its sample up to its last answer


class EpisodeRows:
    """Episodes by number: each a seed, which is a function of (run seed, task, number)."""

    def __init__(self, task: str, spec: Spec, description: Mapping[str, Any], ctx: Context) -> None:
        self._task, self._spec = task, spec
        self._facts = {name: description[name] for name in ("library", "players")}
        self._seed, self._side = ctx.config.seed, "eval" if ctx.evaluation else "train"

    def __len__(self) -> int:
        return 1 << 31

    def at(self, position: int) -> Prompt:
        """The prompt of an episode: what the players read comes from the game."""
        seed = seed_of(self._seed, GYM, self._side, self._task, position) % (1 << 31)
        facts = {"game": self._spec.game, "seed": seed, **self._facts}
        return Prompt(id="", position=position, prompt=f"{self._spec.game} {seed}", metadata={GYM: facts})

    def state(self) -> dict[str, Any]:
        """See `slime_core.protocols.PromptSource`."""
        return {"game": self._spec.game, **self._facts}


def spec_of(options: Options, task: str) -> Spec:
    """The game of a task as the options have it, without seeds and opponents."""
    return Spec(
        game=options.game or task,
        arguments=options.game_args,
        modules=options.modules,
        players=options.players,
        invalid_moves=options.invalid_moves,
        random_actions=options.random_actions,
        instructions=options.instructions,
        template=options.template,
        actions=options.actions,
        pictures=options.pictures,
    )


async def play_group(group: Group, ctx: Context, processes: GameProcesses, speech: Speech) -> Group:
    """One episode a rollout, side by side; samples of further players join the group."""
    waiting = [(rollout, group.samples[places[0]]) for rollout, places in group.rollouts.items()]
    episodes = await together(
        play(sample, group.prompt, ctx, processes, speech)
        for _, sample in waiting
        if sample.status in (Status.PENDING, Status.ABORTED)
    )
    by_issued = {samples[0].id: samples for samples in episodes}
    for rollout, issued in waiting:
        for sample in by_issued.get(issued.id, [issued])[1:]:
            group.rollouts[rollout].append(len(group.samples))
            group.samples.append(sample)
    return group


async def play(issued: Sample, prompt: Prompt, ctx: Context, processes: GameProcesses, speech: Speech) -> list[Sample]:
    """One episode; the samples of the players that learn, ``issued`` first.

    A game that fails makes them FAILED. Raises EngineError where the engine could not serve a turn.
    """
    table = EpisodeTable(issued, prompt, ctx, speech)
    episode = processes.open(table.spec)
    try:
        await table.play(episode)
    except GameError as error:
        table.failed = " | ".join(filter(None, (error.what, error.why, error.fix)))
    finally:
        episode.close()
    return table.samples()


class EpisodeTable:
    """The players of one episode."""

    def __init__(self, issued: Sample, prompt: Prompt, ctx: Context, speech: Speech) -> None:
        facts = prompt.metadata[GYM]
        options: Options = ctx.options
        chosen = options.opponent_in(evaluation=ctx.evaluation)
        count = int(facts["players"])
        others = () if chosen == "self" else tuple(n for n in range(count) if n != prompt.position % count)
        self._learners = tuple(n for n in range(count) if n not in others)
        self._library = str(facts["library"])
        self.spec = replace(
            spec_of(options, prompt.task),
            players=count,
            seed=facts["seed"],
            random_players=others if chosen == "random" else (),
            random_seed=seed_of(ctx.config.seed, GYM, issued.id, issued.attempt),
        )
        self._issued, self._ctx, self._options, self._speech = issued, ctx, options, speech
        self._players: dict[int, Player] = {}
        self._next = 0  # number of the next sibling
        self._ended = ""  # one of LIMITS, or abort: the run stopped it; else the game has
        self._last = GameTurn()
        self.failed = ""

    async def play(self, episode: Episode) -> None:
        """GameTurn after turn, until the game, a limit or the run ends it; raises GameError and EngineError."""
        turn = await episode.play()
        while not turn.over:
            player = self._player(turn.player)
            if self._options.max_turns and len(player.rewards) >= self._options.max_turns:
                self._ended = "turns"
                break
            await self._hear(player, turn)
            done = await self._speak(player)
            if done is None or done.finish == "abort":
                self._ended = "abort" if done else "context"
                break
            player.rewards.append(0.0)
            turn = await episode.play(self._action(player, done))
            player.invalid += turn.invalid
            for number, reward in turn.rewards.items():
                if (earner := self._players.get(int(number))) is not None:
                    earner.rewards[-1] += reward
        self._last = turn

    def samples(self) -> list[Sample]:
        """The samples of the players that learn and have answered, the issued one first, filled."""
        players = {number: player for number, player in self._players.items() if player.learns}
        for number, player in players.items():
            self._note(number, player)
        if not players:  # over before the model had a turn
            self._finish(self._issued)
        samples = [player.sample for player in players.values()]
        return [self._issued, *(sample for sample in samples[1:] if sample.response_length)]

    def _player(self, number: int) -> Player:
        if number not in self._players:
            learns, ctx = number in self._learners, self._ctx
            if learns and not any(player.learns for player in self._players.values()):
                sample = self._issued
            else:
                self._next += 1
                sample = sibling(self._issued, self._next)
            if self.spec.players > 1:
                sample.role = f"player_{number}"
            sample.metadata[GYM] = dict(sample.metadata[GYM])  # siblings would share it
            if not learns:
                ctx = replace(ctx, engine=frozen_engine(ctx))
            self._players[number] = Player(sample=sample, context=ctx, learns=learns)
        return self._players[number]

    async def _hear(self, player: Player, turn: GameTurn) -> None:
        """Put what a player reads into ids: its prompt, or what follows its last answer."""
        sample, tokenizer = player.sample, self._ctx.tokenizer
        if player.answer:
            words = [{"role": "user", "content": content_of(turn)}] if turn.picture else turn.text
            ids = self._speech.between(words, player.answer)
            player.media = sample.multimodal_inputs, sample.multimodal_train_inputs
            sample.append_response(ids, mask=0, text=tokenizer.decode(ids))
            await self._ctx.append_media(sample, words)
            return
        content = content_of(replace(turn, text=unspecial(turn.text, tokenizer)))
        system = [{"role": "system", "content": self._options.system_prompt}] if self._options.system_prompt else []
        messages: list[Message] = [*system, {"role": "user", "content": content}]
        sample.prompt = bare(messages) if self._speech.template else content
        where, kwargs, inputs = f"the first turn of {sample.id}", self._speech.kwargs, inputs_of(messages)
        text = render(sample.prompt, tokenizer, template=self._speech.template, where=where, kwargs=kwargs)
        ids = encode(tokenizer, text)
        sample.tokens = self._ctx.media.expand(ids, inputs, where) if self._ctx.media is not None else ids
        sample.multimodal_inputs, sample.multimodal_train_inputs = inputs or None, None
        sample.loss_mask = sample.rollout_log_probs = None
        sample.response_length, sample.response, sample.weight_versions = 0, "", []

    async def _speak(self, player: Player) -> Completion | None:
        """A turn of the engine; None where the player's context is full."""
        try:
            done = await player.context.generate(player.sample, request_id=self._issued.id)
        except EngineError as error:
            if not error.ends_dialogue or not player.answer:
                raise
            self._take_back(player)
            return None
        player.answer, player.response = done.tokens, player.sample.response
        return done

    def _take_back(self, player: Player) -> None:
        """Remove what follows a player's last answer: it does not fit into the context."""
        sample = player.sample
        assert sample.loss_mask is not None
        sample.truncate_response(sample.response_length - sample.loss_mask[::-1].index(1), player.response)
        sample.multimodal_inputs, sample.multimodal_train_inputs = player.media

    def _action(self, player: Player, done: Completion) -> str:
        """What the game is told: the answer without its reasoning."""
        if not self._speech.visible(done.tokens):
            return ""  # reasoning alone
        text = done.text or self._speech.text(done.tokens)
        return text.rpartition(CLOSE)[2].strip()

    def _note(self, number: int, player: Player) -> None:
        """Say how the episode went for a player."""
        if self._ended in LIMITS and self._library == "textarena":  # which has no rewards before the end
            player.rewards[-1] = self._options.unfinished_reward
        player.sample.metadata[GYM] |= {
            "player": number,
            "turns": len(player.rewards),
            "reward": sum(player.rewards),
            "turn_rewards": player.rewards,
            "invalid": player.invalid,
            "ended": self._ended or self._last.reason,
        }
        if self._options.turn_rewards:
            player.sample.train_metadata[BY_TURN] = player.rewards
        self._finish(player.sample)

    def _finish(self, sample: Sample) -> None:
        if self.failed:
            sample.status = Status.FAILED
            sample.metadata[GYM]["failed"] = self.failed
        elif self._ended == "abort":
            sample.status = Status.ABORTED
        else:
            sample.status = Status.TRUNCATED if self._ended in LIMITS else Status.COMPLETED


def content_of(turn: GameTurn) -> Any:
    """What a player reads, as a message's content: a text, or parts where there is a picture."""
    if not turn.picture:
        return turn.text
    text = [{"type": "text", "text": turn.text}] if turn.text else []
    return [{"type": "image", "image": turn.picture}, *text]


def frozen_engine(ctx: Context) -> Any:
    """The engine of the role ``opponent``.

    Raises:
        ConfigError: CFG03 there is none.
    """
    if OPPONENT not in ctx.engines:
        raise ConfigError(
            "plugin.gym.opponent = frozen, and no engine has the role 'opponent'",
            code="CFG03",
            where="rollout.engine_topology",
            fix='name a file with [[group]] role = "opponent", model = "FOLDER" (docs/sglang.md), '
            "or set plugin.gym.opponent to self or random",
        )
    return ctx.engines[OPPONENT]


def rewards(samples: Sequence[Sample]) -> list[Reward]:
    """The game's reward of each sample; an infrastructure error for an episode that failed."""
    return [reward_of(sample.metadata.get(GYM, {})) for sample in samples]


def reward_of(facts: Mapping[str, Any]) -> Reward:
    """One sample's reward. Terms: ``turns``, and ``invalid``, the share of them that were invalid moves."""
    if "failed" in facts:
        return Reward(value=0.0, kind="infra_error", reason=facts["failed"])
    turns = facts.get("turns", 0)
    terms = {"turns": float(turns), "invalid": facts.get("invalid", 0) / max(turns, 1)}
    return Reward(value=facts.get("reward", 0.0), terms=terms)
