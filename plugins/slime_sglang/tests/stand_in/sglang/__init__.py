"""A stand-in for SGLang that starts in an instant: its public entry and as much of its wire as a launch needs."""
