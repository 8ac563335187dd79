"""An engine and a trainer on one device that is strict: what neither may do with its memory fails at once."""

from durability.fake_trainer import FakeTrainer
from slime_core.clusters.colocation import STATE, MemorySwapping
from slime_core.testing.fakes import FakeEngine

NEEDS = {"engine": {"kv": 40, "weights": 10}, "trainer": {"parameters": 20, "gradients": 20, "optimizer": 40}}


class Device:
    """Counts what both hold, and fails where it is more than there is."""

    def __init__(self, size=100):
        self.held, self.size = {}, size
        self.log = []

    def move(self, who, what, take):
        self.log.append(f"{who} {'+' if take else '-'} {' '.join(sorted(what))}")
        for part in what:
            assert ((who, part) in self.held) != take, f"{who} {part} twice: {self.log}"
            if take:
                self.held[who, part] = NEEDS[who][part]
            else:
                del self.held[who, part]
        assert self.free() >= 0, f"out of memory: {self.log}"

    def free(self):
        return self.size - sum(self.held.values())


class StrictEngine(FakeEngine):
    """As SGLang: memory goes only while it is idle, each part once, and released weights are lost until a load."""

    def __init__(self, device):
        super().__init__()
        self.device, self.lost = device, False
        device.move("engine", {"kv", "weights"}, True)

    async def pause(self, mode):
        self.device.log.append(f"pause {mode}")
        self.mode = mode
        await super().pause(mode)

    async def resume(self):
        assert self._resident == {"kv", "weights"}, self._resident
        assert not self.lost, "serves weights that are lost"
        self.device.log.append("resume")
        await super().resume()

    async def release(self, what):
        assert self._paused, "not paused"
        assert self.mode != "keep" or not self._running, "a kept request needs its cache"
        self.lost |= "weights" in what
        self.device.move("engine", what, False)
        await super().release(what)

    async def reacquire(self, what):
        self.device.move("engine", what, True)
        await super().reacquire(what)

    async def load(self, update):
        await super().load(update)
        self.device.log.append(f"load {update.version}")
        self.lost = False


class StrictTrainer(FakeTrainer):
    """Takes memory for what it does not hold; a second release of the same is nothing."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        device.move("trainer", self._held, True)

    async def begin(self, stage):
        missing = STATE - self._held
        await self.reacquire(missing)
        await super().begin(stage)
        await self.release(missing)

    async def release(self, what):
        if mine := what & self._held:
            self.device.move("trainer", mine, False)
        await super().release(what)

    async def reacquire(self, what):
        if missing := what - self._held:
            self.device.move("trainer", missing, True)
        await super().reacquire(what)

    async def publish(self, version, route=None):
        assert "parameters" in self._held
        self.device.log.append(f"publish {version}")
        return await super().publish(version, route)


async def lent(device):
    """As a cluster starts: the engine first, which gives its memory before the trainer is made."""
    engine = StrictEngine(device)
    await engine.pause("retract")
    await engine.release({"kv", "weights"})
    trainer = StrictTrainer(device)
    return engine, trainer, MemorySwapping(engine, trainer, released=True, free=device.free)
