"""Entries that tests of the sandbox run inside it: trusted code, some of which does what untrusted code would do."""

import os


def echo(channel):
    """Every message, in upper case."""
    while True:
        channel.send(channel.receive().upper())


def run_source(channel):
    """What a plugin's runner does: execute the source it is sent; ``answer`` is what it leaves."""
    names = {"channel": channel, "os": os}
    exec(compile(channel.receive(), "candidate.py", "exec"), names)
    if "answer" in names:
        channel.send(names["answer"])
