"""slime's own functions run here unchanged: signatures, argument view, import finder, the server of /generate."""
