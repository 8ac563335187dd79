"""Cannot be imported."""

raise RuntimeError("not today")
