"""A run of the world without torch, left alone twice (once with a slow ledger), or killed at given boundaries and resumed; says what differs.

python tests/chaos/witness.py over ledger.suspend.after:2 checkpoint.renamed:1
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "tools"))

import world

from durability.audit import Audit, audit, differences
from durability.chaos import Kill, ask, run_child, tail


def witness(name: str, boundaries: list[str], place: Path) -> list[str]:
    """Sentences; empty where all is well."""
    scenario = world.SCENARIOS[name]
    world.install(place / "site")
    world.warm(place / "warm", [name])
    alone = world.left_alone(scenario, place / "alone", seed=3)
    again = world.World(scenario, place / "again", seed=3)
    again.slow = 0 if boundaries else 300
    for place_of_death in boundaries:
        if place_of_death == "litter":  # what a kill in the middle of a removal leaves
            (again.run_dir / "checkpoints" / ".tmp-removed-step-2-left").mkdir()
            continue
        point, _, nth = place_of_death.partition(":")
        kill = Kill(seconds=60.0, boundary=point, nth=int(nth or 1))
        ended = run_child(lambda: again.start(again.run_dir.exists()), log=again.log, kill=kill)
        if not ended.stood:
            return [f"the run never came to {place_of_death}, it ended with {ended.code}:\n{tail(again.log)}"]
    ended = run_child(lambda: again.start(again.run_dir.exists()), log=again.log)
    if ended.code or ended.left:
        return [f"the run ended with {ended}:\n{tail(again.log)}"]
    found: Any = ask(lambda: asdict(audit(again.run_dir)), log=again.log)
    ignored = world.AHEAD_OF_A_CHECKPOINT if scenario.keys.get("max_staleness") else ()
    return list(found["wrong"]) + differences(Audit(**alone["audit"]), Audit(**found), ignored)


def main() -> int:
    with tempfile.TemporaryDirectory(
        prefix="slime-witness-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as it:
        wrong = witness(sys.argv[1], sys.argv[2:], Path(it))
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
