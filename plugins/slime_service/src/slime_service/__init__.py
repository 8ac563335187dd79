"""Base of a plugin's HTTP service: a folder with a token, a socket, a guard before its routes, a server."""
