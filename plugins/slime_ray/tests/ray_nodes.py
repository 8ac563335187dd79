"""Ray nodes of a test, real and short-lived: processes that bear its mark, and that are gone when its block ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MARK = "SLIME_TEST_NODE"
"""Variable of all that a node starts: its cluster's mark, and its name."""


@dataclass
class Nodes:
    """A cluster of its own: ``address``, and the environment ``env`` of whoever is to enter it."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    where: str = field(
        default_factory=lambda: tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp")
    )  # sockets' names are short
    env: dict = field(default_factory=dict)
    address: str = ""
    jobs: str = ""  # of the server that takes jobs, where there is a dashboard

    def __post_init__(self):
        token = uuid.uuid4().hex * 2
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_worker_niceness": "0", **self.env}

    @contextmanager
    def node(self, name, *words, processors=1, **env):
        """A node; everything of it is killed with the block."""
        told = {**os.environ, **self.env, MARK: f"{self.mark}-{name}", **env}
        command = [str(Path(sys.executable).with_name("ray")), "start", f"--num-cpus={processors}", "--block", *words]
        process = subprocess.Popen(
            command, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            said = ""
            while "block forever" not in said:  # its last words, when all is there
                line = process.stdout.readline()
                assert line, said
                said += line
            yield process
        finally:
            process.stdout.close()
            for pid in self.pids(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(60)

    def pids(self, name="", words=""):
        """Processes of a node, or of the cluster, whose command lines have the words; the oldest first."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid, environment = int(entry.name), (entry / "environ").read_bytes()
                line = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if f"{MARK}={self.mark}-{name}".encode() in environment and words in line:
                    found.append(pid)
        return sorted(found)


@contextmanager
def ray_cluster(*more, processors=2, dashboard=False, **env):
    """A head, and a node of one processor for each further name; with ``dashboard`` one that takes jobs."""
    nodes = Nodes(env=env)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, nodes.where, ignore_errors=True)
        words = [f"--include-dashboard={str(dashboard).lower()}", "--disable-usage-stats", f"--temp-dir={nodes.where}"]
        if dashboard:
            port, agents = free_ports(2)
            nodes.jobs = f"http://127.0.0.1:{port}"
            words += [
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={port}",
                f"--dashboard-agent-listen-port={agents}",
            ]
        stack.enter_context(nodes.node("head", "--head", "--port=0", *words, processors=processors))
        nodes.address = (Path(nodes.where) / "ray_current_cluster").read_text().strip()
        for name in more:
            stack.enter_context(nodes.node(name, f"--address={nodes.address}"))
        yield nodes


def free_ports(count):
    """Ports of the loopback that are nobody's; what Ray takes by itself another cluster here may have."""
    with ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [door.getsockname()[1] for door in doors]
