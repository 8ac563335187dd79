"""The row and the server of the tests."""

import os
from importlib.util import find_spec
from pathlib import Path

from scripts import python

TEMPLATES = Path(find_spec("trl").origin).parent / "chat_templates"
TOOLS = Path(__file__).with_name("mcp_tools.py")
ASK = [{"role": "user", "content": "1+2=?"}]
FORKING = f"slime-mcp-{os.getpid()}"
STDIO = {"name": "tools", "command": [*python(FORKING), str(TOOLS)]}
