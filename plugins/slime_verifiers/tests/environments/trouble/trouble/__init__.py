"""Everything that an environment may do wrong, by the task's word; the word `fine` has a reward."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field

KEPT = []


def parent(pid):
    """The process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class TroubleTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        word = self.data.prompt
        if word == os.environ.get("TROUBLE_KILLS"):
            os.kill(parent(parent(os.getpid())), signal.SIGKILL)  # the run, in the middle of its episodes
            await asyncio.sleep(3600)
        if word == "raises":
            raise KeyError("JUDGE_API_KEY")
        if word == "nan":
            return float("nan")
        if word == "waits":
            await asyncio.sleep(3600)
        if word == "hangs":
            print("hanging now", file=sys.stderr, flush=True)
            time.sleep(3600)
        if word == "exits":
            sys.exit("no license")
        if word == "aborts":
            subprocess.Popen(["sleep", "3601"], start_new_session=True)
            print("something went badly wrong", file=sys.stderr)
            os.abort()
        if word == "babbles":
            subprocess.Popen(["sleep", "3602"], start_new_session=True)
            for number in range(3, 4096):
                with suppress(OSError):
                    os.write(number, b'{"id": "what"}\n[]\n')
        if word == "leaks":
            while True:
                KEPT.append(bytearray(64 << 20))
        if word == "sockets":
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            for _ in range(10_000):
                KEPT.append(socket.socket())
        return sum(place * ord(letter) for place, letter in enumerate(trace.last_reply, 1)) % 101 / 101


class TroubleConfig(vf.TasksetConfig):
    words: list[str] = Field(default_factory=lambda: ["fine"])
    wants_key: bool = False


class TroubleTaskset(vf.Taskset[TroubleTask, TroubleConfig]):
    def load(self):
        if self.config.wants_key:
            os.environ["TROUBLE_API_KEY"]
        return [TroubleTask(vf.TaskData(prompt=word), self.config.task) for word in self.config.words]


__all__ = ["TroubleTaskset"]
