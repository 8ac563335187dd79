"""Stands for Claude Code and Codex: asks with the contents of TASK.md, and writes the answer to a file."""

import json
import os
import sys
import tomllib
import urllib.request
from pathlib import Path


def ask(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def claude(task):
    assert json.loads(Path.home().joinpath(".claude.json").read_text())["hasCompletedOnboarding"]
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": [{"role": "user", "content": task}]}
    url = f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages"
    return ask(url, os.environ["ANTHROPIC_AUTH_TOKEN"], body)["content"][0]["text"]


def codex(task):
    config = tomllib.loads(Path.home().joinpath(".codex/config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    answer = ask(
        f"{provider['base_url']}/{provider['wire_api']}",
        os.environ[provider["env_key"]],
        {"model": config["model"], "input": task},
    )
    return answer["output"][0]["content"][0]["text"]


name, *words = sys.argv[1:]
if words != ["--version"]:
    assert "Read TASK.md, and don't stop." in words
    assert ("--fast" in words) == (os.environ.get("MODE") == "fast")
    Path("answer.txt").write_text({"claude": claude, "codex": codex}[name](Path("TASK.md").read_text()))
print(name, words)
