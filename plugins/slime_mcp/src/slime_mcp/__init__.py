"""Tools of MCP servers for a model in training: `--plugin mcp`, `[plugin.mcp] servers = [...]`."""
