"""Work on an engine of several servers."""

import asyncio

from faulty import draw
from serving import PATIENCE, request

from slime_sglang.bodies import seed

EXPECTED = [draw(seed(11), position) for position in range(3, 9)]  # of request(...)


def run(work):
    asyncio.run(asyncio.wait_for(work, PATIENCE))


async def begun(engine, fakes, names, count=6):
    """Requests that servers have and hold."""
    for fake in fakes:
        fake.hold = True
    tasks = {name: asyncio.create_task(engine.generate(request(name, count))) for name in names}
    for fake in fakes:
        await fake.until(lambda: sum(len(one.running) for one in fakes) == len(names))
    return tasks
