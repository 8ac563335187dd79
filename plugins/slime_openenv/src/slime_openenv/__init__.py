"""OpenEnv environments as tasks of slime: a client of their protocol, which imports nothing of them."""
