"""What happens to candidates when something else fails: the driver, the fork server, the machine's supply."""

import asyncio
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime_core.errors import SandboxError
from slime_sandbox import Policy, Sandbox
from slime_sandbox.warden import Warden
from slime_sandbox.wire import collect, packet_pair, post

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).with_name("test_sandbox_levels.py")
ENTRY = "sandbox_entries:run_source"
SECONDS = 30
LIMIT = """
import os, resource, sys
from slime_sandbox import kernel
kernel.setns(os.open(f"/proc/{sys.argv[1]}/ns/user", os.O_RDONLY), kernel.CLONE_NEWUSER)
if sys.argv[2] == "processes":
    _, hard = resource.prlimit(int(sys.argv[1]), resource.RLIMIT_NPROC)
    resource.prlimit(int(sys.argv[1]), resource.RLIMIT_NPROC, (int(sys.argv[3]), hard))
else:
    with open("/proc/sys/user/max_mnt_namespaces", "w") as file:
        file.write(sys.argv[3])
"""


def all_end(descriptors):
    """Whether the processes behind all pidfds end."""
    return all(select.select([number], [], [], SECONDS)[0] for number in descriptors)


def test_when_the_driver_is_killed_everything_dies(processes):
    """SIGKILL: the driver does nothing. The daemon of a candidate is in a session of its own."""
    command = [sys.executable, str(DRIVER), "auto", "hold"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    opened, held = json.loads(driver.stdout.readline()), json.loads(driver.stdout.readline())
    assert (opened["level"], held) == ("strong", {"holds": True})
    family = processes.below(driver.pid)
    assert len(family) == 6, "two of the keeper, the fork server, a warden, a candidate and its daemon"
    assert processes.with_words("sleep 8642") == family[-1:]
    watched = [os.pidfd_open(pid) for pid in family]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert all_end(watched)
    for number in watched:
        os.close(number)


@pytest.fixture
def own(request, processes):
    """A sandbox that may be broken, in a loop of its own; and how to find its processes, its fork server last, before it the
    keeper, while no candidate runs.
    """
    policy = Policy(level=getattr(request, "param", "auto"), i_trust_this_code=True, restarts=1)
    before = processes.below(os.getpid())  # of tests before this one
    with asyncio.Runner() as runner:
        box = runner.run(Sandbox.open(policy, preload=("sandbox_entries",)))
        yield runner.run, box, lambda: [pid for pid in processes.below(os.getpid()) if pid not in before]
        runner.run(box.aclose())
    assert set(processes.below(os.getpid())) <= set(before)


def limit(pid, what, most):
    """Lower what that process may have, with the rights of its user namespace's owner."""
    subprocess.run([sys.executable, "-c", LIMIT, str(pid), what, str(most)], check=True)


async def lose(box, pid):
    """A candidate that has begun when that process is killed."""
    async with box.spawn(ENTRY) as child:
        await child.send(b"import signal\nchannel.send(b'1')\nsignal.pause()")
        await child.receive(deadline=SECONDS)
        os.kill(pid, signal.SIGKILL)
        return await child.finish()


@pytest.mark.parametrize("own", ["auto", "none"], indirect=True)
@pytest.mark.parametrize("who", ["fork server", "keeper"])
def test_a_fork_server_that_dies_is_started_again_within_its_budget(own, who):
    run, box, family = own

    def victim():
        return family()[-1 if who == "fork server" else -2]

    outcome = run(lose(box, victim()))
    assert (outcome.status, outcome.reason) == ("infra", "the jail ended without giving a reason")
    assert run(box.run(ENTRY, b"answer = b'again'")).result == b"again"
    assert run(lose(box, victim())).status == "infra"
    with pytest.raises(SandboxError) as caught:
        run(box.run(ENTRY, b""))
    assert caught.value.code == "SBX140"
    assert "died 2 times" in caught.value.what


def own_folders():
    """Of candidates of this process: others' come and go."""
    return {path for place in ("/dev/shm", "/tmp") for path in Path(place).glob(f"slime-sandbox-{os.getpid()}-*")}


@pytest.mark.parametrize("own", ["auto", "medium", "none"], indirect=True)
def test_a_warden_that_is_killed_takes_its_candidate_along(own):
    """At no level is anybody left waiting, nor a process or a folder left behind."""
    run, box, family = own
    idle = set(family())
    folders = own_folders()

    async def killed():
        async with box.spawn(ENTRY) as child:
            await child.send(b"import os, signal\nchannel.send(str(os.getpid()).encode())\nsignal.pause()")
            await child.receive(deadline=SECONDS)
            warden = next(pid for pid in family() if pid not in idle)  # above its candidate
            os.kill(warden, signal.SIGKILL)
            return await asyncio.wait_for(child.finish(), SECONDS)

    outcome = run(killed())
    assert outcome.status != "ok"
    assert set(family()) == idle
    assert own_folders() == folders
    assert run(box.run(ENTRY, b"answer = b'again'")).result == b"again"


@pytest.mark.parametrize("who", ["fork server", "keeper"])
def test_no_process_to_be_had_is_never_the_candidates_fault(own, who):
    """EAGAIN of fork, where the candidate would be made and where its warden would be."""
    run, box, family = own
    pid = family()[-1 if who == "fork server" else -2]
    limit(pid, "processes", 0)
    outcome = run(box.run(ENTRY, b"answer = b'1'"))
    assert (outcome.status, "temporarily unavailable" in outcome.reason) == ("infra", True), outcome
    limit(pid, "processes", 1000)
    assert run(box.run(ENTRY, b"answer = b'1'")).result == b"1"


def test_no_namespace_to_be_had_is_never_the_candidates_fault(own):
    """ENOSPC of unshare: the limit of the sandbox's own user namespace, which its owner sets."""
    run, box, family = own
    pid = family()[-1]
    for most, status in ((1, "infra"), (1000, "ok")):
        limit(pid, "namespaces", most)
        outcome = run(box.run(ENTRY, b"answer = b'1'"))
        assert outcome.status == status, outcome
        assert ("No space left on device" in outcome.reason) == (status == "infra")


def test_no_descriptor_to_be_had_is_never_the_candidates_fault(own):
    """EMFILE of the driver."""
    run, box, _ = own
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        outcome = run(box.run(ENTRY, b"answer = b'1'"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    assert (outcome.status, "Too many open files" in outcome.reason) == ("infra", True), outcome
    assert run(box.run(ENTRY, b"answer = b'1'")).result == b"1"


def test_descriptors_that_cannot_travel_cost_one_candidate_and_no_other():
    """ETOOMANYREFS of the driver, which is no root: the fork server is well, and is not started again."""
    command = [sys.executable, str(DRIVER), "auto", "--as-plain-user", "crowd"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    _, refused, neighbour, later = map(json.loads, done.stdout.splitlines())
    assert (refused["status"], "Too many references" in refused["reason"]) == ("infra", True), refused
    assert neighbour["status"] == "ok", neighbour
    assert (later["status"], later["result"]) == ("ok", "again"), later


def test_an_entry_that_is_not_there_is_no_fault_of_the_candidate(own):
    run, box, _ = own
    outcome = run(box.run("sandbox_entries:missing", b""))
    assert (outcome.status, "has no attribute 'missing'" in outcome.reason) == ("infra", True)


def test_an_answer_that_a_cancelled_driver_waited_for_leaves_nothing(own, processes):
    run, box, _ = own
    before = processes.below(os.getpid())

    async def cancel():
        running = asyncio.ensure_future(box.run(ENTRY, b"while True: pass"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(cancel())
    assert processes.below(os.getpid()) == before


@pytest.fixture
def watched():
    """``watched(message)``: a warden that was told ``message`` while its driver wants nothing any more; both ends."""
    with ExitStack() as ends:

        def watch(*messages):
            made = (driver, report), (told, telling), (_, requests) = packet_pair(), packet_pair(), packet_pair()
            for end in (end for pair in made for end in pair):
                ends.enter_context(end)
            for message in messages:
                post(telling, message)
            driver.shutdown(socket.SHUT_WR)
            driver.setblocking(False)
            setup = {"layers": ["uid", "rlimits"], "proc": True, "readable": []}
            warden = Warden(setup, {"limits": {}}, report, requests)
            warden._watch(told)
            return warden, driver, telling

        yield watch


def test_a_candidate_that_ran_already_when_its_end_is_asked_for_is_known_and_ended(watched):
    """It prints too much, or ends, before its warden has looked: both are told at once."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        try:
            warden, driver, _ = watched({"jailed": child.pid})
            assert (collect(driver)[0], warden.group) == ({"jailed": True}, child.pid)
            warden._end_group()
            assert child.wait(SECONDS) == -signal.SIGKILL
        finally:
            child.kill()


def test_a_candidate_whose_end_is_asked_for_before_it_runs_never_runs(watched):
    """Saying that it is jailed is the last thing that it does before it runs, and fails."""
    warden, _, telling = watched()
    assert warden.group == 0
    with pytest.raises(BrokenPipeError):
        post(telling, {"jailed": os.getpid()})
