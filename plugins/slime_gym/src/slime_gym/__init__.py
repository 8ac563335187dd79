"""Text games for slime: TextArena's games with self-play, and Gymnasium's text environments."""

__version__ = "0.1.0"
