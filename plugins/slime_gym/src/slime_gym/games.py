"""One episode of a game, in the process that plays it: TextArena's games here, Gymnasium's in `environments`.

Both libraries are imported in these two alone, and only when a game of theirs is opened. An episode is a function of
its seeds and its actions: `TextArenaGame` draws from Python's global generators, which the process keeps apart by
episode.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

LIBRARIES = ("textarena", "gymnasium")
LONGEST = 100_000  # characters of an observation
LONGEST_PICTURE = 1 << 23  # characters of a picture
MOST_PLAYERS = 15
MOST_TRIES = 400  # of a random player tries before it gives up
BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


class GameError(Exception):
    """A game that cannot be played; ``why`` and ``fix`` are for a person."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix


@dataclass(slots=True, frozen=True, kw_only=True)
class Spec:
    """A game, and how an episode of it is played.

    Example: Spec(game="TicTacToe-v0", seed=7, random_players=(1,))
    """

    game: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the game's class
    modules: Sequence[str] = ()  # that register games: names, or paths of Python files
    players: int = 0  # 0: the fewest
    invalid_moves: int = -1  # allowed in a row; -1: as many as the game allows
    random_players: Sequence[int] = ()
    random_actions: Sequence[str] = ()  # that they try beside those in brackets in the game's text
    instructions: str = ""  # in place of the game's own
    template: str = ""  # of Gymnasium's observations
    actions: Sequence[str] = ()  # names of Gymnasium's numbered actions
    pictures: bool = False  # whether Gymnasium's environments are shown as pictures
    seed: int = 0
    random_seed: int = 0  # of the random players


@dataclass(slots=True, kw_only=True)
class GameTurn:
    """What the next player reads, or the end of the episode."""

    player: int = 0
    text: str = ""
    picture: str = ""  # before the text: a PNG as a data URI
    over: bool = False
    rewards: dict[str, float] = field(default_factory=dict)  # by player; of this step, or at the end
    invalid: bool = False  # whether the last action was an invalid move
    reason: str = ""  # why it is over, as the game says


class Game(Protocol):
    """An episode."""

    players: int
    library: str

    def turn(self) -> GameTurn:
        """What comes now; what a player has read is not shown to it again."""

    def step(self, action: str) -> None:
        """Take the action of the player whose turn it is."""

    def close(self) -> None:
        """Free what the episode holds."""


def open_game(spec: Spec) -> Game:
    """Begin an episode.

    Raises:
        GameError: an unknown game, or one that cannot be played here.
    """
    from slime_gym.environments import GymnasiumGame, gymnasium_ids

    for module in spec.modules:
        import_module(module)
    library, _, name = spec.game.partition(":")
    if library not in LIBRARIES:
        library, name = "", spec.game
    names: list[str] = []
    for candidate in (library,) if library else LIBRARIES:
        if importlib.util.find_spec(candidate) is None:
            continue
        ids = textarena_ids() if candidate == "textarena" else gymnasium_ids()
        if name in ids or (candidate == "gymnasium" and ":" in name):
            return (TextArenaGame if candidate == "textarena" else GymnasiumGame)(name, spec)
        names += ids
    raise unknown(name, names)


def unknown(name: str, names: Sequence[str]) -> GameError:
    """The error of a game that no library has."""
    absent = ", ".join(library for library in LIBRARIES if importlib.util.find_spec(library) is None)
    ids = {id_.lower(): id_ for id_ in names if not id_.endswith(("-raw", "-train"))}
    near = ", ".join(ids[key] for key in difflib.get_close_matches(name.lower(), ids, n=5, cutoff=0.5))
    fix = f"did you mean {near}?" if near else "name a module that registers it: plugin.gym.modules"
    return GameError(f"there is no game '{name}'", f"not installed: {absent}" if absent else "", fix)


def import_module(name: str) -> None:
    """Import what registers games: a module, or a Python file by its path, once."""
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name)
    if path.stem not in sys.modules:
        description = importlib.util.spec_from_file_location(path.stem, path)
        if description is None or description.loader is None or not path.exists():
            raise GameError(f"there is no file {name}", fix="correct plugin.gym.modules")
        module = sys.modules[path.stem] = importlib.util.module_from_spec(description)
        description.loader.exec_module(module)


def textarena_ids() -> list[str]:
    """The ids of TextArena's games. Nothing is downloaded: data of nltk must be there."""
    if importlib.util.find_spec("nltk") is not None:
        import nltk

        nltk.download = lambda *arguments, **options: False
    from textarena.envs import registration

    return list(registration.ENV_REGISTRY)


class TextArenaGame:
    """A game of TextArena, read as its messages come: a player hears only what is new to it."""

    library = "textarena"

    def __init__(self, name: str, spec: Spec) -> None:
        self._spec, self._chance = spec, Random(spec.random_seed)
        self._over = self._invalid = False
        self._moves: dict[int, list[str]] = {}  # in brackets in what a random player has read
        self.players, self._env = self._reset(name, spec)
        if spec.invalid_moves >= 0:
            self._env.state.error_allowance = spec.invalid_moves
        self._play_random()

    def turn(self) -> GameTurn:
        """See `Game`."""
        if self._over:
            return self._end()
        player, messages = self._env.get_observation()
        return GameTurn(player=player, text=self._text(player, messages), invalid=self._invalid)

    def step(self, action: str) -> None:
        """See `Game`."""
        self._invalid = self._take(action)
        self._play_random()

    def close(self) -> None:
        """See `Game`."""

    def _reset(self, name: str, spec: Spec) -> tuple[int, Any]:
        import textarena

        error: Exception | None = None
        for players in (spec.players,) if spec.players else range(1, MOST_PLAYERS + 1):
            try:
                env = self._make(name, spec)
            except Exception as refused:
                raise unplayable(name, refused) from refused
            try:
                env.reset(num_players=players, seed=spec.seed)
            except Exception as refused:
                error = refused
                continue
            if spec.players or players > 1 or isinstance(env.state, textarena.SinglePlayerState):
                return players, env
        raise unplayable(name, error, players=spec.players)

    def _make(self, name: str, spec: Spec) -> Any:
        """The environment with its action wrappers alone: others put the whole history into every observation."""
        import textarena

        env: Any = textarena.make(name, **spec.arguments)
        wrappers = []
        while isinstance(env, textarena.Wrapper):
            if isinstance(env, textarena.ActionWrapper):
                wrappers.append(type(env))
            env = env.env
        for wrapper in reversed(wrappers):
            env = wrapper(env)
        return env

    def _text(self, player: int, messages: Sequence[Any]) -> str:
        """The messages that a player has not read, without its own; ``instructions`` replace the game's."""
        from textarena import GAME_ID, ObservationType

        lines = []
        for sender, message, kind in messages:
            if kind is ObservationType.PROMPT:
                lines.append(self._spec.instructions or message)
            elif sender == GAME_ID:
                lines.append(message)
            elif sender != player:
                lines.append(f"[{self._env.state.role_mapping.get(sender, f'Player {sender}')}] {message}")
        return "\n".join(lines)

    def _take(self, action: str) -> bool:
        """Play a move; whether it was invalid."""
        state, player = self._env.state, self._env.state.current_player_id
        before = state.error_count
        self._over, _ = self._env.step(action)
        lost = bool(state.game_info.get(player, {}).get("invalid_move"))
        return lost or (state.error_count > before and state.current_player_id == player)

    def _play_random(self) -> None:
        while not self._over and self._env.state.current_player_id in self._spec.random_players:
            player, messages = self._env.get_observation()
            moves = self._moves.setdefault(player, [])
            moves += BRACKETED.findall(self._text(player, messages))
            self._take(self._legal(player, moves))

    def _legal(self, player: int, moves: Sequence[str]) -> str:
        """A random move that a copy of the game takes as valid."""
        digits = map(str, range(10))
        counts = [f"[{a}]" for a in range(10)] + [f"[{a} {b}]" for a in digits for b in range(10)]
        pools = [list(dict.fromkeys([*self._spec.random_actions, *moves])), counts]
        tried = 0
        for pool in pools:
            self._chance.shuffle(pool)
            for move in pool[: MOST_TRIES - tried]:
                tried += 1
                if self._is_legal(player, move):
                    return move
        name = self._spec.game
        fix = 'plugin.gym.random_actions = ["[move]", ...], or another opponent'
        raise GameError(f"a random player found no legal move of {name} in {tried} tries", fix=fix)

    def _is_legal(self, player: int, move: str) -> bool:
        import random

        state_of_generator, trial = random.getstate(), copy.deepcopy(self._env)
        state = trial.state
        state.error_allowance, before = 1 << 30, state.error_count
        try:
            trial.step(move)
        except Exception:
            return False
        finally:
            random.setstate(state_of_generator)
        return not (state.error_count > before or state.game_info.get(player, {}).get("invalid_move"))

    def _end(self) -> GameTurn:
        rewards, info = self._env.close()
        if not isinstance(rewards, Mapping):
            raise GameError(f"{self._spec.game} ended without rewards")
        values = {str(player): float(reward) for player, reward in rewards.items()}
        reasons = [facts.get("reason") for facts in info.values() if isinstance(facts, Mapping)]
        reason = next((str(reason) for reason in reasons if reason), "")
        return GameTurn(over=True, rewards=values, reason=reason, invalid=self._invalid)


def shortened(value: Any) -> str:
    """A text of a value, at most 200 characters."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def unplayable(name: str, error: Exception | None, players: int = 0) -> GameError:
    """What a library's error at the start means for a person."""
    text = shortened(f"{type(error).__name__}: {str(error).strip()}") if error else "it takes no number of players"
    message = f"{name} cannot be played here"
    if isinstance(error, LookupError) and (resources := _nltk_resources(error)):
        fix = f"python -m nltk.downloader {' '.join(resources)}   where there is a network; slime downloads nothing"
        return GameError(message, f"it needs data of nltk that is not there: {', '.join(resources)}", fix)
    if "API key" in text:
        return GameError(
            message, "a model behind a paid service plays a part in it", "set the key that the game names: " + text
        )
    if isinstance(error, SyntaxError):
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return GameError(message, f"its code is not valid in {version}: {text}", "use Python 3.12 or newer")
    if isinstance(error, FileNotFoundError):
        return GameError(message, f"the installed package lacks a file of it: {text}", "play another game")
    if players:
        return GameError(f"{name} cannot be played by {players} players", text, "leave plugin.gym.players out")
    return GameError(message, text, "check plugin.gym.game_args, and what the game needs")


def _nltk_resources(error: LookupError) -> list[str]:
    return sorted(set(re.findall(r"nltk\.download\('([^']+)'\)", re.sub(r"\x1b\[\d*m", "", str(error)))))


def checked(turn: GameTurn) -> GameTurn:
    """A turn with an observation of sensible size and finite rewards.

    Raises:
        GameError: it has neither.
    """
    if len(turn.text) > LONGEST:
        raise GameError(f"an observation has {len(turn.text):,} characters; {LONGEST:,} are allowed")
    if len(turn.picture) > LONGEST_PICTURE:
        raise GameError("a picture takes more than 6 MB as a PNG", fix="make the environment draw smaller ones")
    strange = [reward for reward in turn.rewards.values() if not math.isfinite(reward)]
    if strange:
        raise GameError(f"a reward is {strange[0]}")
    return turn


def describe(spec: Spec) -> dict[str, Any]:
    """What is known of a game before any episode; raises as :func:`open_game` and :func:`checked`."""
    game = open_game(spec)
    turn = checked(game.turn())
    game.close()
    return {"library": game.library, "players": game.players, "text": turn.text, "pictures": bool(turn.picture)}
