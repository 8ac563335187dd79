"""Rules of the rollout buffer's keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

KEY = "rollout.rollout_buffer_url"
OTHERS = ("rollout_function_path", "custom_generate_function_path", "load_debug_rollout_data")


def conflicts(config: Config) -> Iterator[Problem]:
    """What cannot hold together with ``rollout_buffer_url``."""
    rollout = config.rollout
    if not rollout.rollout_buffer_url:
        return
    yield from _url(rollout.rollout_buffer_url)
    for key in OTHERS if not config.train.offline else ():  # offline stages have their responses
        if getattr(rollout, key):
            yield conflict(
                f"{key} and rollout_buffer_url are both set",
                [f"rollout.{key}", KEY],
                why="each says where rollouts come from",
                fix="leave one of them out",
            )
    if any(task.generate for task in config.data.tasks):
        yield conflict(
            "a task has a generate function, and rollout_buffer_url is set",
            ["data.tasks", KEY],
            why="each says where rollouts come from",
            fix="leave one of them out",
        )
    if rollout.partial_rollout:
        yield conflict(
            "partial_rollout needs the core's own generation",
            ["rollout.partial_rollout", KEY],
            why="what a generator elsewhere has half made is not the run's to keep",
            fix="--no-partial-rollout",
        )


def incomplete(config: Config) -> Iterator[Problem]:
    """What a run cannot start without."""
    name = config.rollout.rollout_buffer_token_env
    if config.rollout.rollout_buffer_url and not os.environ.get(name):
        yield conflict(
            f"{name} is not set",
            ["rollout.rollout_buffer_token_env"],
            why="the rollout buffer requires a token",
            fix=f"export {name}=$(cat DIR/token)   (slime buffer serve DIR names the file)",
            code="CFG09",
        )


def _url(url: str) -> Iterator[Problem]:
    reason = ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        reason = str(error)
    else:
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            reason = "it is not of the form http(s)://HOST:PORT"
        elif parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
            reason = "it holds more than scheme, host and port; the token comes from the environment"
    if reason:
        yield conflict(
            "rollout_buffer_url is not an address of a rollout buffer",
            [KEY],
            why=reason,
            fix="give what slime buffer serve prints: --rollout-buffer-url http://127.0.0.1:PORT",
            code="CFG03",
        )
