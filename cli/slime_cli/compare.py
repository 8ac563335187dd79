"""`slime compare A B`: per set the difference of two evaluations of the same questions, and a paired test."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slime_cli.tables import heading, print_table


@click.command("compare", epilog="Example: slime compare runs/demo-0 runs/demo-0 --version-a 0")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option("--version-a", type=int, help="Of A's evaluations those at this step; default the newest of each set.")
@click.option("--version-b", type=int, help="The same of B.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("--markdown", is_flag=True, help="The answer as Markdown tables.")
def command(
    first: Path, second: Path, version_a: int | None, version_b: int | None, as_json: bool, markdown: bool
) -> None:
    """Compare two evaluations, question by question.

    A and B are run directories, of `slime eval` or of training, or files of their evaluations/. The test is paired:
    McNemar's exact test with one sample a question, a sign-flip test with more; the interval is a bootstrap over
    questions.
    """
    from slime_cli.evaluation_differences import compare
    from slime_cli.evaluation_records import find_records
    from slime_cli.evaluation_tables import difference_tables, to_markdown

    comparison = compare(find_records(first, version_a), find_records(second, version_b))
    if as_json:
        answer = {"a": str(first), "b": str(second), "sets": [difference.to_dict() for difference in comparison]}
        click.echo(json.dumps(answer, indent=1, sort_keys=True))
        return
    for table in difference_tables(comparison):
        if markdown:
            click.echo(to_markdown(table))
        else:
            heading(table.title)
            print_table(table.columns, table.rows)
    for difference in comparison:
        click.echo(difference.sentence)
