"""Games for the tests: `Faulty-v0` breaks as its player says, `Room-v0` says that it was closed, `SeenLake-v0` is seen."""

import ctypes
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import gymnasium
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
        if action == "babble":
            for number in range(3, 4096):  # the socket among them
                with suppress(OSError):
                    os.write(number, b"good luck\n")
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


class Room(gymnasium.Env):
    """An environment of one step, which says that it was closed."""

    observation_space, action_space = gymnasium.spaces.Text(9), gymnasium.spaces.Discrete(2)

    def __init__(self, closed):
        self.closed = Path(closed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return "gone", 1.0, True, False, {}

    def close(self):
        self.closed.touch()


gymnasium.register("Room-v0", Room)


def seen_lake():
    """Gymnasium's frozen lake, whose drawing is its observation."""
    lake = gymnasium.make("FrozenLake-v1", render_mode="rgb_array", is_slippery=False)
    return gymnasium.wrappers.AddRenderObservation(lake)


gymnasium.register("SeenLake-v0", seen_lake)
