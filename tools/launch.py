"""What train.py and train_async.py share: slime's flags in, `slime run` with those that slime_compat makes of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from slime_cli.failure import CliSession, report_failure
from slime_cli.main import main as slime
from slime_compat.launch.flags import differences
from slime_compat.launch.translation import translate
from slime_core.errors import SlimeError
from slime_core.report.text import say


def main(argv: Sequence[str] | None = None, *, ahead: int) -> int:
    """Run a command line of slime's; ``ahead`` as in `translate`. The exit code is that of `slime run`."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        translation = translate(words, ahead=ahead)
        translation.require_complete()
    except SlimeError as error:
        return report_failure(error, CliSession(as_json="--json" in words))
    os.environ.update(translation.environment)
    for notice in (*translation.notices, *(f"notice: {text}" for text in differences(os.environ))):
        say(notice)
    return slime(translation.words)
