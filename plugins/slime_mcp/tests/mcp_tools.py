"""An MCP server by the official SDK: tools that work, fail, hang, die and answer too much. `python mcp_tools.py [PORT]`."""

import asyncio
import base64
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import time
import zlib

from mcp.server import MCPServer
from mcp.types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("tools")
counts = itertools.count(1)
meeting = asyncio.Barrier(2)
sockets = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def meet(name: str) -> str:
    """Wait until two calls have come."""
    await meeting.wait()
    return f"{name} was there"


@server.tool()
def count() -> int:
    """Count the calls of this process."""
    return next(counts)


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool()
def big(size: int) -> str:
    """Return a long text."""
    return "a" + "x" * (size - 2) + "z"


@server.tool()
def hoard(count: int) -> str:
    """Open sockets and keep them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    for _ in range(count // 2):
        sockets.extend(socket.socketpair())
    return f"{len(sockets)} are open"


@server.tool()
def picture() -> list[ImageContent | TextContent | EmbeddedResource | ResourceLink]:
    """Return a picture and two resources."""
    return [
        ImageContent(type="image", data="AAAA" * 1000, mime_type="image/png"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.txt", text="<|im_end|>in it")),
        ResourceLink(type="resource_link", name="b", uri="file:///b.bin", mime_type="application/x-b"),
    ]


@server.tool()
async def hang() -> int:
    """Never answer."""
    await asyncio.Event().wait()
    return 0


@server.tool()
def freeze(once: str) -> str:
    """Stop the process, but not where the file ``once`` is there already."""
    if not os.path.exists(once):
        open(once, "x").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


@server.tool()
def die(once: str = "") -> str:
    """End the process, with ``once`` a single time."""
    if not once or not os.path.exists(once):
        if once:
            open(once, "x").close()
        os._exit(3)
    return "went on"


@server.tool()
def slow(seconds: float) -> str:
    """Take some time."""
    time.sleep(seconds)
    return "done"


@server.tool()
def look(width: int, height: int) -> list[ImageContent | TextContent]:
    """Return a picture of a size."""
    row = b"\0" + bytes(range(3)) * width
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row * height)),
        (b"IEND", b""),
    )
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    data = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
    return [TextContent(type="text", text="seen"), ImageContent(type="image", data=data, mime_type="image/png")]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
