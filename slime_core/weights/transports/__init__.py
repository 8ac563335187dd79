"""How weights leave the trainer: as a folder, or as the run's engine has them sent."""
