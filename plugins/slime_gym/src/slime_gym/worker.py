"""A process that plays episodes for slime: one JSON line a request, one a response.

    python -m slime_gym.worker FD PARENT MEMORY_BYTES        serve, until the other side closes
    python -m slime_gym.worker describe SPEC                 print what is known of a game

Python's and NumPy's global random generators, from which many games draw, are kept apart by episode, so that an
episode is a function of its seeds and actions whatever runs beside it. It ends with its parent.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy

from slime_core.parent import die_with
from slime_gym.games import Game, GameError, GameTurn, Spec, checked, describe, open_game

OUT_OF_MEMORY = 86  # exit code


class PlayedEpisode:
    """A game and the state of the random generators while it does not run."""

    def __init__(self, spec: Spec) -> None:
        self._python = random.Random(spec.seed).getstate()
        self._numpy = numpy.random.RandomState(spec.seed % 2**32).get_state()
        self.game: Game
        with self.drawing():
            self.game = open_game(spec)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this episode's generators inside the block."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), numpy.random.get_state()


class Episodes:
    """The episodes of this process by key."""

    def __init__(self) -> None:
        self._episodes: dict[str, PlayedEpisode] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The response to a request; an episode is kept until it is closed."""
        key = request["key"]
        if request.get("close"):
            episode = self._episodes.pop(key, None)
            if episode is not None:
                guarded(episode.game.close)
            return None
        return guarded(lambda: asdict(self._turn(key, request)))

    def _turn(self, key: str, request: dict[str, Any]) -> GameTurn:
        """The turn after the actions of a request, in an episode that is there or begins with it."""
        first = "spec" in request
        if first:
            self._episodes[key] = PlayedEpisode(Spec(**request["spec"]))
        episode = self._episodes[key]
        with episode.drawing():
            turn = checked(episode.game.turn()) if first else GameTurn()
            for action in request["actions"]:
                episode.game.step(action)
                turn = checked(episode.game.turn())
        return turn


def guarded(work: Callable[[], Any]) -> dict[str, Any]:
    """What ``work`` returns, or its error in words; without memory the process ends, and others go on in a new one."""
    try:
        return work() or {}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except GameError as error:
        return {"error": error.what, "why": error.why, "fix": error.fix}
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = (
            f"{os.path.basename(os.path.dirname(frame.filename))}/{os.path.basename(frame.filename)}:{frame.lineno}"
        )
        return {"error": f"the game raised {type(error).__name__}: {str(error)[:500]} ({place})", "why": "", "fix": ""}


def main() -> None:
    """Serve, or describe a game."""
    out = os.dup(1)
    os.dup2(2, 1)  # what games print is no answer
    if sys.argv[1] == "describe":
        spec = Spec(**json.loads(sys.argv[2]))
        os.write(out, json.dumps(guarded(lambda: describe(spec))).encode())
        os._exit(0)
    die_with(int(sys.argv[2]))
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    episodes = Episodes()
    with socket.socket(fileno=int(sys.argv[1])).makefile("rwb") as file:
        for line in file:
            response = episodes.answer(json.loads(line))
            if response is not None:
                file.write(json.dumps(response).encode() + b"\n")
                file.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
