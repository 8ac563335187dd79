"""Fakes, tiny models and contract suites, for our tests and plugin authors'."""
