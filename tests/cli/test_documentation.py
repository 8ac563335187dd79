"""The pages about config, commands and errors say what the code does."""

import re
from pathlib import Path

import pytest

from slime_cli.main import COMMANDS
from slime_core import errors
from slime_core.error_codes import MEANINGS, PARTS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CODE = re.compile(r'"([A-Z]{3}\d{2,3})"')


def rows(page, cells):
    """Rows of a page's tables with that many cells, header and rule left out."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    found = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in found if len(row) == cells and not row[0].startswith("---")]


def codes_in_source():
    """Every text of the source that is a code and nothing else."""
    files = [path for folder in ("slime_core", "cli/slime_cli", "plugins") for path in (ROOT / folder).rglob("*.py")]
    sources = (
        path for path in files if not {"templates", "tests", "error_codes.py"} & set(path.relative_to(ROOT).parts)
    )
    return {code for path in sources for code in CODE.findall(path.read_text())}


def test_every_error_code_of_the_source_has_a_meaning_and_no_other():
    raised = codes_in_source()
    assert raised - set(MEANINGS) == set(), "add these to slime_core/error_codes.py"
    assert set(MEANINGS) - raised == {"CFG10"}, "CFG10 is a warning; the others are raised nowhere"


def test_exit_codes_of_the_letters_are_those_of_the_error_tree():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SlimeError)]
    by_letters = {kind.default_code[:3]: kind.exit_code for kind in kinds} | {"TOK": errors.DataError.exit_code}
    assert {letters: exit_code for letters, (exit_code, _) in PARTS.items()} == by_letters


def test_the_page_of_errors_is_what_the_command_prints_with_an_anchor_for_every_code(cli):
    page, printed = (ROOT / "docs" / "errors.md").read_text(), cli("explain", "--markdown").out
    assert page.endswith(printed), "paste slime explain --markdown"
    assert set(re.findall(r'<a id="(\w+)"></a>', page)) == {code.lower() for code in MEANINGS}


def test_every_exit_code_of_the_error_tree_is_documented():
    documented = {int(row[0]) for row in rows("cli.md", 2) if row[0].isdigit()}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SlimeError)]
    assert {kind.exit_code for kind in kinds} <= documented


def test_every_command_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`slime {name}" in text for name in COMMANDS)


def test_the_tables_of_megatrons_flags_are_what_the_command_prints(cli):
    page, printed = (ROOT / "docs" / "megatron.md").read_text(), cli("config", "keys", "--megatron", "--markdown").out
    assert page.endswith(printed.rstrip() + "\n"), "paste slime config keys --megatron --markdown"


def test_the_key_tables_are_what_the_command_prints(cli):
    page = (ROOT / "docs" / "config.md").read_text()
    assert page.endswith(cli("config", "keys", "--markdown").out.rstrip() + "\n"), "paste slime config keys --markdown"


def test_the_table_of_slimes_flags_is_what_the_command_prints(cli):
    page = (ROOT / "docs" / "slime_flags.md").read_text()
    assert page.endswith(cli("compat", "flags", "--markdown").out.rstrip() + "\n"), (
        "paste slime compat flags --markdown"
    )
