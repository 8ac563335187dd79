"""How weights leave the trainer: as a folder, as memory that servers read, or as a broadcast into their ranks."""
