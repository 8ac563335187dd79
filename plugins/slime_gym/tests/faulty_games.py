"""Games that break in the ways that games break, for the tests: `Faulty-v0` does what its player says."""

import ctypes
import os
import random
import signal
import time
from pathlib import Path

import textarena


class Faulty(textarena.Env):
    """Eight moves; each is answered with a number drawn from the global generator."""

    def __init__(self, folder=""):
        self.folder = folder

    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "go")

    def step(self, action):
        if action == "raise":
            raise RuntimeError("the dice are lost")
        if action == "hang":
            time.sleep(3600)
        if action == "exit":
            os._exit(3)
        if action == "crash":
            ctypes.string_at(0)
        if action == "leak":
            self.leak = bytearray(1 << 40)
        if action == "long":
            self.state.add_observation("x" * 200_000, textarena.ObservationType.GAME_MESSAGE)
        if self.folder:
            self._halt()
        self.state.add_observation(str(random.random()), textarena.ObservationType.GAME_MESSAGE)
        if self.state.turn == 7:
            self.state.set_outcome(random.random(), "eight moves")
        return self.state.step()

    def _halt(self):
        """The fortieth move in a folder kills the process that plays, once."""
        with (Path(self.folder) / "moves").open("a") as moves:
            moves.write(".")
            if moves.tell() == 40:
                os.kill(os.getppid(), signal.SIGKILL)


textarena.envs.register("Faulty-v0", Faulty)
