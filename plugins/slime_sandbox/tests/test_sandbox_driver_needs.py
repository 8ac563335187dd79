"""What CUDA's driver does when it starts, as strace told of one on an H200, without a GPU: threads get names by files of
/proc, and a local socket with an abstract address is bound. Who has no GPU may do neither, and nobody more than that.
"""

import pytest

pytestmark = pytest.mark.unit

SOCKET = """
import socket
def tried(do, *words):
    try:
        do(*words)
        return "yes"
    except OSError as error:
        return type(error).__name__
def made(kind=socket.SOCK_SEQPACKET, family=socket.AF_UNIX):
    return socket.socket(family, kind)
"""
DRIVER = f"""{SOCKET}
answer = [tried(made().connect, "/tmp/nvidia-mps/control")]
own = made()
answer += [tried(own.bind, "\\0cuda-uvmfd-4026532000-2"), tried(own.listen)]
with open("/proc/self/task/" + os.listdir("/proc/self/task")[0] + "/comm", "w") as file:
    file.write("cuda")
answer = " ".join([*answer, open("/proc/self/comm").read().strip()]).encode()
"""


def test_the_driver_finds_what_it_needs_and_nothing_is_counted(sandbox):
    outcome = sandbox.candidate(DRIVER, gpu="GPU-0")
    assert outcome.result == b"FileNotFoundError yes yes cuda", outcome
    assert outcome.violations == {}


@pytest.mark.parametrize(
    ("source", "answer", "counted"),
    [
        ('tried(made().bind, "\\0somebody-else")', "PermissionError", {"bind": 1}),
        ('tried(made().connect, "\\0cuda-uvmfd-1-2")', "PermissionError", {"connect": 1}),
        ('tried(made().connect, "\\0somebody-else")', "PermissionError", {"connect": 1}),
        ('tried(made().bind, "cuda-uvmfd-1")', "PermissionError", {"bind": 1}),  # a path, not an abstract name
        ("tried(made, socket.SOCK_STREAM)", "PermissionError", {}),
        ("tried(made, socket.SOCK_STREAM, socket.AF_INET)", "PermissionError", {"socket": 1}),
        ("tried(open, '/proc/self/comm', 'w')", "PermissionError", {}),
    ],
)
def test_sockets_unlike_a_drivers_are_denied_with_a_gpu_too(sandbox, source, answer, counted):
    outcome = sandbox.candidate(f"{SOCKET}\nanswer = {source}.encode()", gpu="GPU-0")
    assert (outcome.result.decode(), outcome.violations) == (answer, counted), outcome


def test_without_a_gpu_there_is_no_socket_and_no_name_for_a_thread(sandbox):
    assert sandbox.candidate(f"{SOCKET}\nanswer = tried(made).encode()").result == b"PermissionError"
    source = f"{SOCKET}\nanswer = tried(open, '/proc/self/task/' + str(os.getpid()) + '/comm', 'w').encode()"
    assert sandbox.candidate(source).result == b"PermissionError"
