"""The wire of sglang-router 0.3.2: /liveness, /workers, /generate; servers in turn, or by X-SMG-Routing-Key (manual).

Words of ``--behave``: ``open`` asks for no token, ``deaf`` takes up no server, ``ends@second`` ends at every start but
the first.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from typing import Any

import aiohttp
from aiohttp import web

from sglang_router.router_args import RouterArgs


class Router:
    """One router."""

    def __init__(self, args: RouterArgs) -> None:
        self.args, self.behave = args, set(args.behave.split(","))
        self.workers: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.turn = 0

    @staticmethod
    def from_args(args: RouterArgs) -> Router:
        """As the original."""
        return Router(args)

    def start(self) -> None:
        """Serve until a signal."""
        print(f"{self.args=}", flush=True)
        if "ends@second" in self.behave:
            mark = os.readlink("/proc/self/fd/1") + ".second"
            if os.path.exists(mark):
                print("\x1b[31mERROR\x1b[0m no such policy, says the router", flush=True)
                sys.exit(4)
            open(mark, "w").close()
        app = web.Application(middlewares=[self.guard], client_max_size=1 << 30)
        routes = {"GET /liveness": self.live, "GET /workers": self.listed, "POST /workers": self.added}
        routes |= {"GET /workers/{name}": self.one, "DELETE /workers/{name}": self.deleted}
        for route, handler in {**routes, "POST /generate": self.generate}.items():
            app.router.add_route(*route.split(), handler)
        web.run_app(app, host=self.args.host, port=self.args.port, print=None, handle_signals=True)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Every route but /liveness wants the token."""
        free = request.path == "/liveness" or "open" in self.behave
        if not free and request.headers.get("Authorization") != f"Bearer {self.args.api_key!s}":
            return web.Response(status=401)
        return await handler(request)

    async def live(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def listed(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": list(map(shown, self.workers.values())), "total": len(self.workers)})

    async def added(self, request: web.Request) -> web.Response:
        """POST /workers: taken up a moment later."""
        body = await request.json()
        name = str(uuid.uuid4())
        worker = {"id": name, "is_healthy": True, "worker_type": "regular", **body}
        print("worker", json.dumps(shown(worker)), flush=True)
        if "deaf" not in self.behave:
            asyncio.get_running_loop().call_later(0.01, self.workers.__setitem__, name, worker)
        return web.json_response({"status": "accepted", "worker_id": name}, status=202)

    async def one(self, _: web.Request) -> web.Response:
        return web.json_response({"job_status": "failed: nobody is there"})

    async def deleted(self, request: web.Request) -> web.Response:
        found = self.workers.pop(request.match_info["name"], None)
        return web.json_response({"status": "accepted"}, status=202 if found else 404)

    async def generate(self, request: web.Request) -> web.Response:
        kinds = [worker["worker_type"] for worker in self.workers.values()]
        chosen = [worker for worker in self.workers.values() if worker["worker_type"] != "prefill"]
        if not chosen or (self.args.pd_disaggregation and "prefill" not in kinds):
            return self.own(503, "no_available_workers", "No available workers")
        worker = self.choose(chosen, request.headers.get("X-SMG-Routing-Key", ""))
        token = self.args.api_key if self.args.pd_disaggregation else worker.get("api_key", "")
        headers = {"Authorization": f"Bearer {token!s}", "Content-Type": "application/json"}
        url = worker["url"] + "/generate"
        try:
            async with aiohttp.request("POST", url, data=await request.read(), headers=headers) as reply:
                return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")
        except aiohttp.ClientError:
            said = f"error sending request for url ({url}). URL: {url}"
            return self.own(500, "call_upstream_request_error", said)

    def choose(self, chosen: list[dict[str, Any]], key: str) -> dict[str, Any]:
        """In turn; with the policy ``manual`` the one that had the key."""
        self.turn += 1
        worker = chosen[self.turn % len(chosen)]
        if self.args.policy == "manual" and key:
            url = self.keys.setdefault(key, worker["url"])
            worker = next((one for one in chosen if one["url"] == url), worker)
        return worker

    def own(self, status: int, code: str, said: str) -> web.Response:
        """An answer of the router's own."""
        body = {"error": {"type": "x", "code": code, "message": said}}
        return web.json_response(body, status=status, headers={"X-SMG-Error-Code": code})


def shown(worker: dict[str, Any]) -> dict[str, Any]:
    """What the router tells of a worker."""
    return {key: worker[key] for key in worker if key != "api_key"}
