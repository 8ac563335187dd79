"""What an HTTP service of a plugin stands on: a folder with a token, a socket, a guard before its routes, a server."""
