"""Problems, checked: our own, a hub data set's, or those of JSONL, Parquet and Python files."""

from slime_kernelbench.problems.catalogue import answer, shipped
from slime_kernelbench.problems.load import load
from slime_kernelbench.problems.split import Split, split

__all__ = ["Split", "answer", "load", "shipped", "split"]
