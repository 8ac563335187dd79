"""Games for slime: TextArena's games with self-play, and Gymnasium's environments as texts or pictures."""

__version__ = "0.1.0"
