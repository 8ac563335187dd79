"""A judge that does what the first word of a candidate says, in a worker or served with such workers.

    python stand_in_worker.py FOLDER DESCRIPTOR            the worker
    python stand_in_worker.py serve FOLDER WORKERS GRACE   `slime kernelbench serve`

    correct  wrong  runtime_error  timeout  infra     that verdict
    crash  unjudgeable                                a process that died; a problem that nobody can judge
    die      die_once                                 SIGKILL for this process; once: only where FOLDER/died is missing
    hang                                              never an answer
    wait                                              writes its pid to the pipe FOLDER/begun, reads the pipe FOLDER/go
    meet                                              an answer where three are judged at once
    (the canary's source, which imports)              correct, but wrong where FOLDER/sick names this device

FOLDER/judged has a line for each: the device and the word. The protocol and its loop are the worker's own.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from slime_kernelbench.service.verdicts import hash_of, infra
from slime_kernelbench.service.worker import run
from slime_kernelbench.types import Diagnostic, Verdict

FOLDER = Path(sys.argv[1])
DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES") or "cpu"


class AsTold:
    def __init__(self):
        self.three = asyncio.Barrier(3)

    async def judge(self, source, problem):
        word = "canary" if "import" in source else source.split()[0]
        with (FOLDER / "judged").open("a") as file:
            file.write(f"{DEVICE} {word}\n")
        if word == "die" or (word == "die_once" and not (FOLDER / "died").exists()):
            (FOLDER / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "hang":
            await asyncio.Event().wait()
        if word == "meet":
            await self.three.wait()
        if word == "wait":
            await asyncio.to_thread(self.wait)
        if word == "infra":
            return infra("StandIn", "nothing could be judged", source=source)
        if word == "canary" and (FOLDER / "sick").exists() and DEVICE in (FOLDER / "sick").read_text():
            word = "wrong"
        if word == "unjudgeable":
            return infra("Unjudgeable", "the reference does not run", source=source)
        if word == "crash":
            told = Diagnostic(stage="correctness", kind="died", message="was killed by SIGSEGV")
            return Verdict(status="runtime_error", reached="correctness", diagnostics=(told,))
        status = word if word in ("wrong", "runtime_error", "timeout") else "correct"
        return Verdict(status=status, reached="correctness", source_hash=hash_of(source), launches=1)

    def wait(self):
        (FOLDER / "begun").write_text(f"{os.getpid()}")
        (FOLDER / "go").read_text()

    async def aclose(self):
        pass


def serve_stand_ins(folder, workers, grace):
    import click  # a worker begins without these

    from slime_kernelbench.service.serve import JudgeSettings, serve

    command = (sys.executable, __file__, folder)
    settings = JudgeSettings(folder=Path(folder), workers=int(workers), grace=float(grace), command=command)
    serve(settings, lambda url, path: click.echo(url))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve_stand_ins(*sys.argv[2:])
    else:
        asyncio.run(run(int(sys.argv[2]), lambda hello: AsTold()))
