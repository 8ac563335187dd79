"""Environments of Gymnasium as games: told in words, by their own drawing of characters, or shown as pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from slime_core.media.references import data_uri
from slime_gym.games import BRACKETED, GameError, GameTurn, Spec, shortened, unplayable

ANSI = re.compile(r"\x1b\[(\d*)(?:;\d+)*m")
NAMES = {  # of the actions of Gymnasium's own environments with numbered actions
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}


def gymnasium_ids() -> list[str]:
    """The ids of Gymnasium's environments."""
    import gymnasium

    return list(gymnasium.registry)


class GymnasiumGame:
    """An environment of Gymnasium: texts, numbers or pictures to observe, a text or a numbered action to answer."""

    library, players = "gymnasium", 1

    def __init__(self, name: str, spec: Spec) -> None:
        import gymnasium
        from gymnasium import spaces

        self._spec, self._name = spec, name
        if spec.players > 1 or spec.random_players:
            raise GameError(f"{name} has one player", fix="leave plugin.gym.players and opponent out")
        try:
            mode = "rgb_array" if spec.pictures else "ansi" if not spec.template else ""
            self._mode = mode if mode in render_modes(name) else ""
            options: dict[str, Any] = {"render_mode": self._mode} if self._mode else {}
            self._env: Any = gymnasium.make(name, **options, **spec.arguments)
        except Exception as refused:
            raise unplayable(name, refused) from refused
        if spec.pictures and not self._mode:
            reason = f"its render modes are: {', '.join(render_modes(name)) or 'none'}"
            raise GameError(f"{name} draws no pictures", why=reason, fix="leave plugin.gym.pictures out")
        pixels = of_pixels(self._env.observation_space)
        self._pictures = self._mode == "rgb_array" or (pixels and not self._mode)
        if not self._mode and not self._pictures and not plain(self._env.observation_space):
            raise GameError(
                f"{name} has observations other than texts and pictures",
                why=f"its observations are {shortened(self._env.observation_space)}",
                fix="set plugin.gym.pictures where it has the render mode rgb_array, or wrap them as Text or Discrete",
            )
        self._actions: list[str] | None = None
        if isinstance(self._env.action_space, spaces.Discrete):
            self._actions = self._named(int(self._env.action_space.n))
        elif not isinstance(self._env.action_space, spaces.Text):
            reason = f"its actions are {shortened(self._env.action_space)}"
            raise GameError(f"{name} has actions other than text", why=reason, fix="wrap them as Text or Discrete")
        allowance = spec.invalid_moves if spec.invalid_moves >= 0 else 1
        self._allowance, self._errors = allowance, 0
        self._reward, self._over, self._reason, self._invalid = 0.0, False, "", False
        observation, _ = self._env.reset(seed=spec.seed)
        self._text = f"{self._instructions()}\n{self._observation(observation)}".rstrip("\n")
        self._picture = self._picture_of(observation)

    def turn(self) -> GameTurn:
        """See `Game`."""
        reward, self._reward = self._reward, 0.0
        return GameTurn(
            text=self._text,
            picture=self._picture,
            over=self._over,
            rewards={"0": reward},
            invalid=self._invalid,
            reason=self._reason,
        )

    def step(self, action: str) -> None:
        """See `Game`."""
        move = self._move(action)
        self._invalid = move is None
        if move is None:
            self._errors += 1
            self._text, self._picture = f"This is not a valid action. {self._choices()}", ""
            if self._errors > self._allowance:
                self._over, self._reason, self._reward = True, "invalid action", -1.0
            return
        self._errors = 0
        observation, reward, terminated, truncated, _ = self._env.step(move)
        self._text, self._picture = self._observation(observation), self._picture_of(observation)
        self._reward = float(reward)
        self._over = bool(terminated or truncated)
        self._reason = "terminated" if terminated else "truncated" if truncated else ""

    def close(self) -> None:
        """See `Game`."""
        self._env.close()

    def _named(self, count: int) -> list[str]:
        defaults = next((names for kind, names in NAMES.items() if self._name.startswith(kind)), ())
        names = list(self._spec.actions or defaults or map(str, range(count)))
        if len(names) != count:
            fix = f"give {count} names in plugin.gym.actions"
            raise GameError(f"{self._name} has {count} actions, and {len(names)} have names", fix=fix)
        return names

    def _instructions(self) -> str:
        return self._spec.instructions or f"You are playing {self._name}. {self._choices()}"

    def _choices(self) -> str:
        if self._actions is None:
            return "Answer with your action in square brackets."
        return f"Answer with one action in square brackets: {', '.join(f'[{name}]' for name in self._actions)}."

    def _observation(self, observation: Any) -> str:
        if self._mode == "ansi":
            return ANSI.sub(lambda code: "]" if code[1] in ("", "0") else "[", str(self._env.render())).strip("\n")
        if self._pictures and not self._spec.template:
            return ""
        parts = observation if isinstance(observation, (tuple, list)) else (observation,)
        template = self._spec.template or ("{0}" if isinstance(observation, str) else "Observation: {observation}")
        try:
            return template.format(*parts, observation=_plain(observation))
        except (IndexError, KeyError, ValueError, AttributeError) as error:
            fix = "use {observation}, or {0}, {1}, ... for its parts"
            raise GameError("plugin.gym.template does not fit the observation", str(error), fix) from error

    def _picture_of(self, observation: Any) -> str:
        """The picture of a state as a data URI; empty where it is told in words."""
        if not self._pictures:
            return ""
        return png(self._env.render() if self._mode == "rgb_array" else observation)

    def _move(self, action: str) -> Any:
        """The action that an answer names last, in brackets before others; None where it names none."""
        texts = [text[1:-1].strip() for text in BRACKETED.findall(action)]
        if self._actions is None:
            text = texts[-1] if texts else action.strip()
            return text if self._env.action_space.contains(text) else None
        numbers = {name.lower(): number for number, name in enumerate(self._actions)}
        named = [numbers[text.lower()] for text in texts if text.lower() in numbers]
        if not named:
            words = "|".join(sorted(map(re.escape, numbers), key=len, reverse=True))
            named = [numbers[text] for text in re.findall(rf"(?<!\w)(?:{words})(?!\w)", action.lower())]
        return named[-1] if named else None


def render_modes(name: str) -> Sequence[str]:
    """How an environment of Gymnasium can be drawn."""
    import gymnasium

    entry: Any = gymnasium.spec(name).entry_point
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    modes: Sequence[str] = getattr(kind, "metadata", {}).get("render_modes", ())
    return modes


def plain(space: Any) -> bool:
    """Whether a space of Gymnasium is made of texts and numbers from a finite set."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return all(map(plain, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(plain, space.spaces))
    return isinstance(space, (spaces.Text, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def of_pixels(space: Any) -> bool:
    """Whether a space of Gymnasium holds pictures: bytes of shape [height, width, 3]."""
    from gymnasium import spaces

    return isinstance(space, spaces.Box) and space.dtype == "uint8" and len(space.shape) == 3 and space.shape[2] == 3


def png(pixels: Any) -> str:
    """The data URI of a picture; pixels uint8 [height, width, 3]."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return data_uri(file.getvalue())


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, tuple) else getattr(value, "tolist", lambda: value)()
