"""The modules of this folder that are no tests can be imported by its tests, and by the processes that they start."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
