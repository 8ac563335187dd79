"""Devices of the service: workers that die, hang or lie as a candidate says, quarantine, the canary, GPUs by UUID."""

import asyncio
import os

import pytest
from judge_services import RELU, canaries, judged, remote, service

from slime_core import ConfigError
from slime_kernelbench.service.devices import Device, devices, visible

pytestmark = pytest.mark.integration


def test_a_candidate_whose_worker_died_is_judged_once_more_after_a_canary(folder):
    async def scenario():
        async with service(folder) as (url, pool, _), remote(url) as judge:
            assert (await judge.judge("die_once", RELU)).status == "correct"
            (place,) = pool.state()["devices"]
            assert (place["quarantines"], place["judged"]) == (1, 1)

    asyncio.run(scenario())
    lines = [line.split()[1] for line in (folder / "judged").read_text().splitlines()]
    assert lines == ["canary", "die_once", "canary", "die_once"]


@pytest.mark.parametrize(
    ("word", "kind", "told"),
    [
        ("die", "WorkerLost", "was killed by SIGKILL"),
        ("hang", "WorkerLost", "said nothing"),
        ("infra", "WorkerLost", ""),
    ],
)
def test_a_candidate_that_fails_twice_is_infra_and_the_device_comes_back(folder, word, kind, told):
    async def scenario():
        async with service(folder, judging=1.5 if word == "hang" else 60.0) as (url, pool, _), remote(url) as judge:
            verdict = await judge.judge(word, RELU)
            assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", kind)
            assert told in verdict.diagnostics[0].message
            assert (await judge.judge("correct", RELU)).status == "correct"
            assert pool.state()["devices"][0]["quarantines"] == 2

    asyncio.run(scenario())
    assert [found for _, found in judged(folder)] == [word, word, "correct"]
    assert canaries(folder) == 3


def test_a_device_whose_canary_fails_gets_no_candidate_until_it_passes(folder):
    (folder / "sick").write_text("GPU-sick")

    async def scenario():
        places = [Device(name="GPU-sick", gpu="GPU-sick"), Device(name="GPU-well", gpu="GPU-well")]
        async with service(folder, places=places) as (url, pool, _), remote(url) as judge:
            verdicts = [await judge.judge(f"correct {number}", RELU) for number in range(4)]
            assert {verdict.status for verdict in verdicts} == {"correct"}
            while (folder / "judged").read_text().count("GPU-sick canary") < 2:
                await asyncio.sleep(0.01)
            assert pool.places[0].state == "quarantined"
            assert "canary" in pool.places[0].why
            assert {device for device, _ in judged(folder)} == {"GPU-well"}
            (folder / "sick").unlink()
            while pool.places[0].state != "ready":
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_gpu_is_tried_after_an_abnormal_end_and_a_processor_is_not(folder):
    async def scenario():
        for gpu, quarantines in (("GPU-1", 2), ("", 0)):
            async with service(folder, places=[Device(name="one", gpu=gpu)]) as (url, pool, _), remote(url) as judge:
                pids = set()
                for word in ("timeout", "crash", "runtime_error", "wrong"):
                    expected = "runtime_error" if word == "crash" else word
                    assert (await judge.judge(word, RELU)).status == expected
                    pids.add(pool.places[0].pid)
                assert pool.places[0].quarantines == quarantines
                assert len(pids) == 1  # the worker itself is sound and stays

    asyncio.run(scenario())
    assert canaries(folder) == 4


def told(folder):
    return [line.split()[1] for line in (folder / "judged").read_text().splitlines()]


def test_a_device_with_lanes_has_so_many_candidates_under_way(folder):
    async def scenario():
        async with service(folder, lanes=3) as (url, _, _), remote(url) as judge:
            verdicts = await asyncio.gather(*(judge.judge(f"meet {number}", RELU) for number in range(6)))
            assert {verdict.status for verdict in verdicts} == {"correct"}

    asyncio.run(scenario())
    assert told(folder) == ["canary", *["meet"] * 6]


def test_a_canary_waits_for_the_other_lanes_and_they_for_it(folder):
    async def scenario():
        places = [Device(name="one", gpu="GPU-1")]
        async with service(folder, places=places, lanes=2) as (url, pool, _), remote(url) as judge:
            first = asyncio.create_task(judge.judge("wait", RELU))
            await asyncio.to_thread((folder / "begun").read_text)
            assert (await judge.judge("timeout", RELU)).status == "timeout"
            third = asyncio.create_task(judge.judge("correct", RELU))
            while not pool.state()["queue"]["waiting"]:
                await asyncio.sleep(0)
            assert pool.places[0].state == "quarantined"
            await asyncio.to_thread((folder / "go").write_text, "")
            assert [(await task).status for task in (first, third)] == ["correct"] * 2

    asyncio.run(scenario())
    assert told(folder) == ["canary", "wait", "timeout", "canary", "correct"]


def test_a_candidate_beside_one_that_killed_the_worker_is_judged_again(folder):
    async def scenario():
        async with service(folder, lanes=2) as (url, _, _), remote(url) as judge:
            first = asyncio.create_task(judge.judge("wait", RELU))
            await asyncio.to_thread((folder / "begun").read_text)
            second = asyncio.create_task(judge.judge("die_once", RELU))
            await asyncio.to_thread((folder / "begun").read_text)  # the first begins again, in another worker
            await asyncio.to_thread((folder / "go").write_text, "")
            assert [(await task).status for task in (first, second)] == ["correct"] * 2

    asyncio.run(scenario())
    assert told(folder)[:4] == ["canary", "wait", "die_once", "canary"]
    assert sorted(told(folder)[4:]) == ["die_once", "wait"]


def test_a_problem_that_nobody_can_judge_is_no_fault_of_the_device(folder):
    async def scenario():
        async with service(folder) as (url, pool, _), remote(url) as judge:
            verdict = await judge.judge("unjudgeable", RELU)
            assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", "Unjudgeable")
            assert pool.places[0].quarantines == 0

    asyncio.run(scenario())
    assert [word for _, word in judged(folder)] == ["unjudgeable"]


def test_no_device_for_too_long_is_infra(folder):
    (folder / "sick").write_text("cpu")

    async def scenario():
        async with service(folder, deadline=0.2) as (url, _, _), remote(url) as judge:
            verdict = await judge.judge("correct", RELU)
            assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", "Deadline")
            assert (await judge.health())["status"] == "no_device"

    asyncio.run(scenario())
    assert judged(folder) == []


LISTING = "0, GPU-aa11\n1, GPU-bb22\n2, GPU-cc33\n"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, "012"), ("2,0", "02"), ("GPU-bb", "1"), ("GPU", ""), ("", ""), ("7", "")],
)
def test_gpus_are_those_that_the_mask_leaves_by_uuid(mask, expected):
    assert "".join(visible(LISTING, mask)) == expected
    assert set(visible(LISTING, mask).values()) <= {"GPU-aa11", "GPU-bb22", "GPU-cc33"}


def test_a_gpu_that_is_not_there_or_named_twice_is_an_error(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device.gpu for device in devices(["1", "GPU-aa11"], 4)] == ["GPU-bb22", "GPU-aa11"]
    assert [device.environment() for device in devices([], 2)] == [{"CUDA_VISIBLE_DEVICES": ""}] * 2
    for wrong, said in ((["3"], "no GPU"), (["1", "GPU-bb22"], "twice")):
        with pytest.raises(ConfigError, match=said):
            devices(wrong, 1)
