"""The row and the server of the tests."""

import sys
from importlib.util import find_spec
from pathlib import Path

TEMPLATES = Path(find_spec("trl").origin).parent / "chat_templates"
TOOLS = Path(__file__).with_name("mcp_tools.py")
ASK = [{"role": "user", "content": "1+2=?"}]
STDIO = {"name": "tools", "command": [sys.executable, str(TOOLS)]}
