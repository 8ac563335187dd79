"""The Data Buffer: sample states in SQLite, payloads in segment files."""
