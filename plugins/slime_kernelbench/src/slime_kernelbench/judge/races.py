"""Programs of one launch as a GPU runs them: in an order that nobody knows, and none waits for another.

The interpreter runs them one after the other, where what races on a GPU comes out right. Here each launch has an order
that is drawn, and what one program stored another may read, or overwrite with other values, only after an atomic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter

Array = NDArray[Any]
_NOBODY = -1


class Races:
    """Which program stored each element of a launch, and the first race that this tells of."""

    def __init__(self) -> None:
        self.order = 0  # of programs; 0 is one after the other
        self.message = ""
        self._grid, self._step, self._offset = (1, 1, 1), 1, 0
        self._program, self._atomic = 0, False  # which one runs, and whether it has done an atomic
        self._writers: dict[tuple[int, int], Array] = {}
        self._kernel = ""

    def launch(self, kernel: str) -> None:
        """Another launch begins, which may do what it likes with the last one's elements."""
        self._kernel = kernel
        self._writers.clear()
        self.order = (self.order * 6364136223846793005 + 1442695040888963407) % (1 << 64) if self.order else 0

    def install(self) -> None:
        """Have the interpreter run programs in this order, for the rest of this process's life."""
        builder: Any = interpreter.interpreter_builder
        shape, place = builder.set_grid_dim, builder.set_grid_idx

        def set_grid_dim(*grid: int) -> None:
            self._shape((grid[0], grid[1], grid[2]))
            shape(*grid)

        def set_grid_idx(x: int, y: int, z: int) -> None:
            place(*self._place(x, y, z))

        builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx

    def _shape(self, grid: tuple[int, int, int]) -> None:
        count = max(grid[0] * grid[1] * grid[2], 1)
        self._grid, self._step, self._offset = grid, 1, 0
        if self.order:
            self._step, self._offset = (self.order >> 32) % count or 1, self.order % count
            while math.gcd(self._step, count) != 1:
                self._step += 1

    def _place(self, x: int, y: int, z: int) -> tuple[int, int, int]:
        """Whose turn it is where the interpreter's own order would have this one."""
        _, height, depth = self._grid
        number = (x * height + y) * depth + z
        count = self._grid[0] * height * depth
        self._program, self._atomic = (number * self._step + self._offset) % count, False
        return self._program // (height * depth), self._program // depth % height, self._program % depth

    # What a program does. ``at`` are addresses in the memory from ``span[0]`` to ``span[1]``.

    def atomic(self) -> None:
        """From here on the program may have waited for others."""
        self._atomic = True

    def load(self, at: Array, span: tuple[int, int]) -> None:
        """It reads."""
        writers = self._writers.get(span)
        if writers is None or self._atomic or self.message:
            return
        owners = writers[at - np.uint64(span[0])]
        if ((owners != _NOBODY) & (owners != self._program)).any():
            self.message = f"kernel {self._kernel}: a program reads elements that another program of the launch stores"

    def store(self, at: Array, span: tuple[int, int], differs: Callable[[], Array]) -> None:
        """It writes; ``differs`` says which of the addresses hold other values so far."""
        if self.message:
            return
        writers = self._writers.get(span)
        if writers is None:
            writers = self._writers[span] = np.full(span[1] - span[0], _NOBODY, dtype=np.int32)
        places = at - np.uint64(span[0])
        owners = writers[places]
        others = (owners != _NOBODY) & (owners != self._program)
        if not self._atomic and others.any() and (others & differs()).any():
            self.message = f"kernel {self._kernel}: two programs of the launch store different values to one element"
        writers[places] = self._program
