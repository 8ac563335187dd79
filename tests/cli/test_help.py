"""Help that needs no network: an example in every `--help`, the meaning of error codes, and shell completion."""

import re
import shlex
import subprocess

import click
import pytest

from slime_cli.main import COMMANDS, cli as slime_command
from slime_core.error_codes import MEANINGS
from slime_core.errors import SlimeError
from slime_core.plugins import available

pytestmark = pytest.mark.integration


def commands():
    """Every command of slime and of the installed plugins, by its words."""
    names = list(COMMANDS)
    for info in available():
        try:
            slime_command.get_command(click.Context(slime_command), info.name)
            names.append(info.name)
        except SlimeError:
            pass  # a plugin without commands
    return {words: command for name in names for words, command in walk(slime_command, name)}


def walk(group, *names):
    command = group.get_command(click.Context(group), names[-1])
    yield " ".join(names), command
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            for words, child in walk(command, name):
                yield f"{' '.join(names)} {words}", child


def example(command):
    """The first `slime ...` of a command's epilog, without what a shell does with its output."""
    match = re.search(r"^(?:Example: |  )(slime [^>&|\n]*)", (command.epilog or "").replace("\b\n", ""), flags=re.M)
    return shlex.split(match[1]) if match else []


def test_every_help_of_slime_and_of_plugins_ends_with_an_example_whose_options_exist():
    every = commands()
    assert len(every) > 40
    assert [words for words, command in every.items() if not example(command)] == []
    for words, command in every.items():
        _, *rest = example(command)
        path = next(" ".join(rest[:n]) for n in range(len(rest), 0, -1) if " ".join(rest[:n]) in every)
        assert path == words or isinstance(command, click.Group), f"the example of {words} is another command's"
        shown = every[path]
        shown.make_parser(click.Context(shown, **shown.context_settings)).parse_args(rest[len(path.split()) :])


def test_an_error_ends_with_its_anchor_and_the_command_that_explains_it(cli):
    done = cli("show", "nowhere")
    assert "see: docs/errors.md#cfg05   or   slime explain CFG05" in done.err
    explained = cli("explain", "cfg05")
    assert (explained.code, MEANINGS["CFG05"] in explained.out) == (0, True)
    assert all(code in cli("explain").out for code in MEANINGS)
    unknown = cli("explain", "CFG055")
    assert (unknown.code, "did you mean" in unknown.err) == (2, True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("slime pl", {"plan", "plugins"}),
        ("slime kern", {"kernelbench"}),
        ("slime run --eps-clip-", {"--eps-clip-high", "--eps-clip-c"}),
        ("slime run --plugin rm_", {"rm_math"}),
        ("slime run --loss-aggregation r", {"rollout_mean", "rollout_sum"}),
        ("slime run my_re", {"my_re"}),
        ("slime plugins n", {"new"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shell_completes_commands_keys_their_values_plugins_and_files(line, expected, cli, monkeypatch):
    words = line.split()
    monkeypatch.setenv("_SLIME_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    done = cli()
    assert done.code == 0
    assert {item.partition(",")[2] for item in done.out.splitlines()} == expected


def test_the_script_of_bash_completes_in_a_shell(cli, tmp_path):
    (tmp_path / "completion.sh").write_text(cli("completion", "bash").out)
    script = "source ./completion.sh && complete -p slime"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "_slime_completion" in done.stdout
    assert all("_SLIME_COMPLETE" in cli("completion", shell).out for shell in ("zsh", "fish"))
