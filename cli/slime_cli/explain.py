"""`slime explain CODE`: the meaning of an error code, without a network."""

from __future__ import annotations

import click

from slime_cli.tables import heading, print_pairs
from slime_core.error_codes import MEANINGS, PARTS, anchor, exit_of, markdown
from slime_core.errors import ConfigError, nearest


@click.command("explain", epilog="Example: slime explain CFG03")
@click.argument("code", required=False)
@click.option("--markdown", "as_markdown", is_flag=True, help="All codes, as docs/errors.md has them.")
def command(code: str | None, as_markdown: bool) -> None:
    """Say what an error code means; without CODE, list them all."""
    if as_markdown:
        click.echo(markdown(), nl=False)
    elif code is None:
        print_pairs(MEANINGS)
    else:
        name = code.upper()
        if name not in MEANINGS:
            raise ConfigError(
                f"there is no error code '{code}'",
                code="CFG00",
                where="command line: CODE",
                why=f"the letters are {', '.join(PARTS)}; a plugin of yours may have its own codes",
                fix="\n".join(filter(None, [nearest(name, [*MEANINGS]), "all codes: slime explain"])),
            )
        heading(name)
        pairs = {"meaning": MEANINGS[name], "about": PARTS[name[:3]][1], "exit code": str(exit_of(name))}
        print_pairs(pairs | {"documentation": anchor(name)})
