"""The other end of `zygote.py`: commands that begin where their imports have ended."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ADDRESS = "SLIME_TESTS_ZYGOTE"


def start_zygote() -> None:
    """Start the zygote of this process and of those that it starts, unless there is one; it ends with this process."""
    if ADDRESS in os.environ:
        return
    os.environ[ADDRESS] = f"slime-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + os.environ[ADDRESS])
        listener.listen()
        command = [sys.executable, str(Path(__file__).with_name("zygote.py")), str(listener.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    atexit.register(process.communicate)


def connect() -> socket.socket:
    """A connection to the zygote, which answers it when its imports have ended."""
    start_zygote()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + os.environ[ADDRESS])
    return connection


class Zygote:
    """See `zygote.py`. A context manager."""

    def __enter__(self) -> Self:
        with connect() as connection:
            self._file = connection.makefile("rw", buffering=1)
        try:
            assert self._read() == {"threads": 1}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def ask(self, **request: Any) -> Any:
        """One child; the answer says how it ended."""
        self._file.write(json.dumps(request) + "\n")
        self._file.flush()
        return self._read()

    def slime(
        self, folder: Path, *args: object, cwd: Path, path: tuple[object, ...] = (), hung: float = 120, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """`slime ARGS` as `subprocess.run` answers it; ``folder`` is for its output. No process of it may be left."""
        out, err = folder / "out.txt", folder / "err.txt"
        err.write_text("")
        words = [str(arg) for arg in args]
        ended = self.ask(
            args=words, cwd=str(cwd), log=str(err), out=str(out), hung=hung, path=[str(place) for place in path],
            env={"COLUMNS": "160", **env},
        )  # fmt: skip
        assert ended["left"] == [], f"processes {ended['left']} outlived `slime {' '.join(words)}`"
        return subprocess.CompletedProcess(words, ended["code"], out.read_text(), err.read_text())

    def together(
        self, folder: Path, commands: Sequence[Sequence[object]], *, path: Sequence[object] = (), **env: str
    ) -> None:
        """Run scripts at the same time, each ``[file, *args]`` in a process of its own; all must end well."""
        log = folder / "scripts.txt"
        words = [[str(word) for word in command] for command in commands]
        ended = self.ask(scripts=words, log=str(log), env=env, path=[str(place) for place in path], hung=240)
        assert (ended["code"], ended["left"]) == (0, []), f"{ended}\n{log.read_text()}"

    def _read(self) -> Any:
        line = self._file.readline()
        if not line:
            raise RuntimeError("the zygote has ended; its error stands above")
        return json.loads(line)
