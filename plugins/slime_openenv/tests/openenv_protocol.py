"""A server of OpenEnv's published protocol with one environment, which fails when it is asked to.

    python openenv_protocol.py PORT NAME [FAULT...]  # faults of the resets, in turn; the last one stays

The environment is a function of its seed and of the actions: "say: c" is rewarded by 1 where the answer has that
letter, and after three steps it is over. A reset's argument ``fail = [STEP, FAULT]`` makes that step fail (0: the
reset).
"""

import asyncio
import json
import os
import sys

from aiohttp import web

LETTERS = "abcdefgh"
SCHEMA = {
    "properties": {"letter": {"type": "string"}, "metadata": {"type": "object", "default": {}}},
    "required": ["letter"],
}


class Faulty:
    """The server. ``limit``: sessions at once."""

    def __init__(self, faults=(), limit=10_000):
        self.limit, self.faults = limit, list(faults)
        self.figures = {"now": 0, "most": 0, "all": 0}  # sessions
        self.tokens = set()
        self.app = web.Application()
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/schema", self.schema)
        self.app.router.add_get("/ws", self.session)

    async def health(self, request):
        return web.json_response({"status": "healthy"})

    async def schema(self, request):
        return web.json_response({"action": SCHEMA, "observation": {}, "state": {}})

    async def session(self, request):
        self.tokens.add(request.headers.get("authorization"))
        if self.faults[:1] == ["http 500"]:
            self._next_fault()
            return web.Response(status=500)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        figures = self.figures
        if figures["now"] >= self.limit:
            data = {
                "message": "no room",
                "code": "CAPACITY_REACHED",
                "active_sessions": 1,
                "max_sessions": self.limit,
            }
            await socket.send_json({"type": "error", "data": data})
            await socket.close()
            return socket
        figures["now"], figures["all"] = figures["now"] + 1, figures["all"] + 1
        figures["most"] = max(figures["most"], figures["now"])
        try:
            await self._serve(socket)
        except ConnectionError:  # what was sent is too long for the other side
            pass
        finally:
            figures["now"] -= 1
        return socket

    def _next_fault(self):
        faults = self.faults
        return faults.pop(0) if len(faults) > 1 else faults[0] if faults else ""

    async def _serve(self, socket):
        seed, steps, fail = 0, 0, (-1, "")
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                await socket.close()
                return
            data = asked.get("data", {})
            if asked["type"] == "reset":
                seed, steps = data["seed"], 0
                fail = data.get("fail") or (0, self._next_fault())
                reward = None
            elif "letter" not in data:
                errors = [{"loc": ["letter"], "msg": "Field required"}]
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                await socket.send_json({"type": "error", "data": data})
                continue
            else:
                reward = float(LETTERS[(seed + steps) % len(LETTERS)] in data["letter"])
                steps += 1
            if fail[0] == steps and fail[1]:
                await self._fail(socket, fail[1])
                continue
            observation = {"hint": f"say: {LETTERS[(seed + steps) % len(LETTERS)]}"}
            answer = {"observation": observation, "reward": reward, "done": steps == 3}
            await socket.send_json({"type": "observation", "data": answer})

    async def _fail(self, socket, fault):
        data = {"observation": {"hint": "?"}, "reward": 1.0, "done": False}
        match fault:
            case "raises":
                await socket.send_json({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}})
            case "drops":
                socket._req.transport.abort()
            case "hangs":
                await asyncio.sleep(3600)
            case "dies":
                os._exit(1)
            case "nonsense":
                await socket.send_str("<html>")
            case "bytes":
                await socket.send_bytes(b"\0")
            case "other type":
                await socket.send_json({"type": "state", "data": {}})
            case "no data":
                await socket.send_json({"type": "observation", "data": {**data, "observation": None}})
            case "nan":
                await socket.send_json({"type": "observation", "data": {**data, "reward": float("nan")}})
            case "huge":
                await socket.send_json({"type": "observation", "data": {**data, "reward": 10**400}})
            case "surrogate":
                await socket.send_json({"type": "observation", "data": {**data, "observation": {"hint": "\ud800"}}})
            case "10 MB":
                observation = {"hint": "x" * 10_000_000}
                await socket.send_json({"type": "observation", "data": {**data, "observation": observation}})
            case "2000 words":
                observation = {"hint": "12345 " * 2000}
                await socket.send_json({"type": "observation", "data": {**data, "observation": observation}})


if __name__ == "__main__":
    web.run_app(Faulty(sys.argv[3:]).app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
