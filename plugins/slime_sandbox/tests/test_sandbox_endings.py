"""How candidates end: whatever they do, the outcome says so and nothing is left."""

import os

import pytest

from slime_sandbox import CandidateEnded, Limits

pytestmark = pytest.mark.integration

ILLEGAL = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0x0F, 0x0B, 0, 0]))  # ud2; on aarch64 a word of zeros is undefined too
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
SEVERAL = """
import time
for _ in range(5):
    if not os.fork():
        held = bytearray(os.urandom(1 << 20) * 96)  # each is within its limit of 256 MiB
        time.sleep(60)
time.sleep(60)
"""
ENDINGS = {
    "raises": ("1 / 0", {}, "died", "exit code 1"),
    "says nothing": ("pass", {}, "died", "without an answer"),
    "exits at once": ("os._exit(0)", {}, "died", "without an answer"),
    "pretends that no layer went on": ("os._exit(78)", {}, "died", "exit code 78"),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", {}, "died", "SIGSEGV"),
    "abort": ("os.abort()", {}, "died", "SIGABRT"),
    "illegal instruction": (ILLEGAL, {}, "died", "SIGILL"),
    "kills itself": ("os.kill(os.getpid(), 9)", {}, "died", "SIGKILL"),
    "kills all it can": ("os.kill(-1, 9); os.kill(os.getppid(), 9)", {}, "died", ""),
    "infinite loop": ("while True: pass", {"wall_seconds": 0.3}, "timeout", "did not end in 0.3 s"),
    "uses up its processor time": ("while True: pass", {"cpu_seconds": 1}, "timeout", "processor time"),
    "ignores every signal": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        {"wall_seconds": 0.3},
        "timeout",
        "0.3 s",
    ),
    "1 GB of memory": ("x = bytearray(1 << 30)", {}, "memory", "memory"),
    "memory in several processes": (SEVERAL, {}, "memory", "memory"),
    "memory that several processes share": (
        "import mmap\nfor _ in range(3):\n    os.fork()\n    m = mmap.mmap(-1, 200 << 20)\n    m.write(bytes(200 << 20))\nwhile True: pass",
        {},
        "memory",
        "memory",
    ),
    "memory in files without a name": (
        "f = os.memfd_create('x')\nfor _ in range(1024): os.write(f, bytes(1 << 20))", {}, "died", "exit code 1",
    ),
    "1 GB of output": ("for _ in range(1024): os.write(1, bytes(1 << 20))", {}, "too_much_output", "65536 bytes"),
    "a file of 1 GB": ("f = open('f', 'wb')\nfor _ in range(1024): f.write(bytes(1 << 20))", {}, "died", "exit code 1"),
    "a million files": ("for i in range(10**6): open(f'{i}', 'w').close()", {}, "died", "exit code 1"),
    "a large answer": ("answer = bytes(1001)", {"result_bytes": 1000}, "too_much_output", "answered 1001 bytes"),
    "an answer that says it is large": ("os.write(3, b'\\x7f' + bytes(7))", {}, "too_much_output", "answered"),
    "half an answer": ("os.write(3, bytes(7) + b'\\x09' + b'1234')", {}, "died", "without an answer"),
    "a fork bomb": ("while True: os.fork()", {"wall_seconds": 5.0}, "died", ""),
    "threads without end": (
        "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()", {}, "died", "",
    ),
    "no source": ("", {}, "died", "without an answer"),
    "bytes that are no text": ("\udcff", {}, "died", "exit code 1"),
    "a NUL": ("x = 1\0", {}, "died", "exit code 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_a_candidate_ends_within_its_limits_and_nothing_of_it_is_left(sandbox, processes, name):
    source, limits, status, reason = ENDINGS[name]
    before = processes.below(os.getpid())
    raw = source.encode(errors="surrogateescape").decode("latin-1") if "\udcff" in source else source
    outcome = sandbox.candidate(raw, **limits)
    assert (outcome.status, reason in outcome.reason) == (status, True), outcome
    assert processes.below(os.getpid()) == before
    assert sandbox.candidate("answer = b'well'").result == b"well"


def test_ten_megabytes_of_source_are_run(sandbox):
    outcome = sandbox.candidate("answer = b'ok'\n" + "# " + "x" * (10 << 20))
    assert (outcome.status, outcome.result) == ("ok", b"ok")


def test_output_of_a_candidate_that_raises_is_kept_with_its_traceback(sandbox):
    outcome = sandbox.candidate("import sys\nprint('seen')\nprint('too', file=sys.stderr)\nraise KeyError('mine')")
    assert outcome.stdout.startswith("seen\ntoo\n") or outcome.stdout.startswith("too\n")
    assert "KeyError: 'mine'" in outcome.stdout
    assert (outcome.exit_code, outcome.signal) == (1, 0)


def test_no_core_is_written(sandbox):
    source = "if not os.fork(): os.abort()\nos.wait()\nanswer = repr(os.listdir('.')).encode()"
    assert b"core" not in sandbox.candidate(source).result


def test_a_daemon_does_not_outlive_its_candidate(sandbox, processes):
    daemon = "import subprocess\nsubprocess.Popen(['sleep', '7531'], start_new_session=True)\nanswer = b'left'"
    assert sandbox.candidate(daemon).result == b"left"
    assert processes.with_words("sleep 7531") == []


def test_a_grandchild_that_holds_the_pipes_does_not_hold_up_the_end(sandbox, processes):
    """It would hold them for two hours; the outcome is that of a candidate that ended by itself."""
    outcome = sandbox.candidate("if not os.fork():\n    import time\n    time.sleep(7200)\nanswer = b'ended'")
    assert (outcome.status, outcome.result) == ("ok", b"ended")


def test_messages_go_both_ways_until_the_driver_has_no_more(sandbox):
    async def talk():
        async with sandbox.box.spawn("sandbox_entries:echo", limits=Limits(wall_seconds=20)) as child:
            answers = []
            for word in (b"one", b"", b"x" * (3 << 20)):
                await child.send(word)
                answers.append(await child.receive(deadline=10))
            return answers, await child.finish()

    answers, outcome = sandbox.run(talk())
    assert answers == [b"ONE", b"", b"X" * (3 << 20)]
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("ok", 0, "")


def test_a_deadline_of_one_answer_ends_the_candidate(sandbox):
    async def wait():
        async with sandbox.box.spawn("sandbox_entries:echo", limits=Limits(wall_seconds=20)) as child:
            with pytest.raises(CandidateEnded) as caught:
                await child.receive(deadline=0.1)
            return caught.value.outcome

    outcome = sandbox.run(wait())
    assert (outcome.status, outcome.reason, outcome.signal) == ("timeout", "did not answer in 0.1 s", 9)


def test_a_candidate_that_nobody_waits_for_is_gone_too(sandbox, processes):
    async def leave():
        async with sandbox.box.spawn("sandbox_entries:echo") as child:
            await child.send(b"hello")
            raise LookupError("of the caller")

    before = processes.below(os.getpid())
    with pytest.raises(LookupError):
        sandbox.run(leave())
    assert processes.below(os.getpid()) == before


def test_files_are_written_before_it_starts(sandbox):
    source = "answer = open('weights.bin', 'rb').read() + open('empty', 'rb').read() + os.getcwd().encode()"
    outcome = sandbox.candidate(source, files={"weights.bin": b"\0\1", "empty": b""})
    assert outcome.result.startswith(b"\0\1/")
    with pytest.raises(ValueError, match="names of files, not paths"):
        sandbox.candidate("", files={"../x": b""})
    missing = sandbox.candidate("answer = repr(os.path.exists('weights.bin')).encode()")
    assert missing.result == b"False"


def test_memory_of_one_that_has_a_gpu_is_bounded_all_the_same(sandbox):
    """No limit of address space there: CUDA reserves more than any machine has."""
    assert (
        sandbox.candidate("x = bytearray(os.urandom(1 << 20) * 400)\nwhile True: pass", gpu="GPU-0").status == "memory"
    )
    seen = sandbox.candidate(
        "import resource\nanswer = repr((os.environ['CUDA_VISIBLE_DEVICES'], resource.getrlimit(resource.RLIMIT_AS)))"
        ".encode()",
        gpu="GPU-0",
    )
    assert seen.result == b"('GPU-0', (-1, -1))"
