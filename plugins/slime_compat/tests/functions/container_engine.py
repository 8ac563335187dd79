"""A program with the words of docker: a container is a copy of a folder, and a path of its own stands for /path."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PLACES = re.compile(r"(?<![\w./])/(?=(?:home|opt|testbed|tmp|usr/local)\b)")


def run(words):
    parser = argparse.ArgumentParser()
    for flag in ("--detach", "--rm"):
        parser.add_argument(flag, action="store_true", required=True)
    parser.add_argument("--network", choices=["host"], required=True)
    parser.add_argument("--entrypoint", choices=["sleep"], required=True)
    parser.add_argument("image")
    parser.add_argument("seconds", type=int)
    image = Path(parser.parse_args(words).image)
    if not image.is_dir():
        sys.exit(f"no such image: {image}")
    print(shutil.copytree(image, Path(tempfile.mkdtemp(dir=image.parent)) / "root"))


def execute(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--interactive", action="store_true")
    parser.add_argument("--user", choices=["root", "agent"])
    parser.add_argument("container")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    root = options.container
    env = {"PATH": f"{root}/usr/local/bin:{os.environ['PATH']}", "GIT_CONFIG_SYSTEM": f"{root}/gitconfig"}
    command = [PLACES.sub(f"{root}/", word) for word in options.command]
    data = None if options.interactive else subprocess.DEVNULL
    if data is None:  # scripts name paths too
        content = sys.stdin.buffer.read()
        if content.isascii():
            content = PLACES.sub(f"{root}/", content.decode()).encode()
        code = subprocess.run(command, input=content, env=env, cwd=root).returncode
    else:
        code = subprocess.run(command, stdin=data, env=env, cwd=root).returncode
    sys.exit(code if code >= 0 else 128 - code)  # of a signal


def remove(words):
    shutil.rmtree(words[-1])


if __name__ == "__main__":
    {"run": run, "exec": execute, "rm": remove}[sys.argv[1]](sys.argv[2:])
