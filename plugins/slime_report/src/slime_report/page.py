"""The page: one HTML file with its styles, scripts and data, or the same page for a server that has the data.

    text | overview | application | samples' pages | plotly

What a person reads first comes first. Data is compressed JSON in base64, so nothing in it is ever markup; scripts put
text into the document with `textContent` alone. The content security policy names the scripts by their hashes and
allows no connection, for a live page one to its own server.

The scripts read everything from one object, ``slime.source`` (assets/source.js): ``overview()``, ``index(run)`` and
``group(run, number)``. A live page passes its own as ``source``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = ("dom.js", "charts.js", "timeline.js", "samples.js", "viewer.js", "app.js")
EMBEDDED = "source.js"
LEVEL = 3  # of compression: 6 takes twice as long for 3 % less


def render(
    overview: Mapping[str, Any], blocks: Iterable[tuple[str, bytes]] = (), *, source: str = ""
) -> Iterator[str]:
    """The page, piece by piece.

    Args:
        overview: of :func:`slime_report.data.overview`; a live page has it for its first paint.
        blocks: further data by name, compressed already (:func:`compressed`).
        source: the script that defines ``slime.source`` in place of the embedded data.
    """
    plots, script = plotly(), application(source)
    title = ", ".join(str(run["name"]) for run in overview["runs"])
    yield asset("page.html").format(
        policy=policy([script, plots], connect="'self'" if source else "'none'"),
        title=html.escape(title),
        style=asset("style.css"),
        made=html.escape(f"{overview['made']}, slime {overview['slime']}"),
        first=first_text(overview["runs"]),
    )
    yield block("overview", compressed(overview))
    yield f"<script>{script}</script>\n"
    for name, data in blocks:
        yield block(name, data)
    yield block("plotly", deflated(plots.encode()))
    yield "</body></html>\n"


def first_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """What is there before any script has run: a row a run."""
    rows = []
    for run in runs:
        versions = run["steps"]["version"]
        cells = (run["name"], run["status"], f"{versions[-1] if versions else 0} steps", run["info"]["started"] or "")
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def policy(scripts: Iterable[str], *, connect: str = "'none'") -> str:
    """The content security policy of the page: these scripts and no other, no connection but ``connect``."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def application(source: str = "") -> str:
    """The page's own script."""
    parts = [asset("start.js"), source or asset(EMBEDDED), *map(asset, SCRIPTS)]
    return "\n".join(parts)


def plotly() -> str:
    """The plotting library, of the installed package."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def compressed(value: Any) -> bytes:
    """JSON, deflated."""
    return deflated(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def deflated(data: bytes) -> bytes:
    """What the scripts inflate."""
    return zlib.compress(data, LEVEL)


def block(name: str, data: bytes) -> str:
    """Data that the scripts read by its name; base64 has no character that ends a script."""
    text = base64.b64encode(data).decode()
    return f'<script type="text/plain" id="data-{name}">{text}</script>\n'


def asset(name: str) -> str:
    """A file of the page."""
    return (files("slime_report") / "assets" / name).read_text(encoding="utf-8")
