"""How weights reach servers other than by a folder: as memory that they read, or as a broadcast into their ranks."""
