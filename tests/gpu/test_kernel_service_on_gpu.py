"""The judge as a service on a GPU: a device by its UUID, speed in the verdict, a kernel that faults and the canary after it."""

import asyncio
import json

import httpx
import pytest
from judge_services import Server

from slime_kernelbench.problems import answer
from slime_kernelbench.service.devices import list_gpus

pytestmark = pytest.mark.gpu

ADD = answer("add")
FAULT = ADD.replace("tl.store(out_ptr + offsets", "tl.store(out_ptr + 100000000000 + offsets")


async def devices(server):
    headers = {"Authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(headers=headers) as http:
        return (await http.get(f"{server.url}/health")).json()["devices"]


def test_a_served_gpu_measures_speed_and_comes_back_after_a_fault(tmp_path):
    for name, source in (("fault.py", FAULT), ("right.py", ADD)):
        (tmp_path / name).write_text(source)
    with Server.real(tmp_path / "judge", "--gpus", "auto", "--timeout", "120") as server:
        (fault,) = json.loads(server.eval(tmp_path / "fault.py").stdout)
        assert not fault["correct"]
        (right,) = json.loads(server.eval(tmp_path / "right.py").stdout)
        assert (right["status"], right["reached"], right["flags"]) == ("correct", "speed", [])
        assert right["timing"]["candidate"] > 0
        found = asyncio.run(devices(server))
        assert {place["device"] for place in found} == set(list_gpus().values())
        assert sum(place["judged"] for place in found) == 2
        assert {place["state"] for place in found} == {"ready"}
