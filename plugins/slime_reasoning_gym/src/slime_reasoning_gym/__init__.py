"""Every task of reasoning_gym for slime: endless rows, its scorers as rewards, curricula and held-out sets."""

__version__ = "0.1.0"
