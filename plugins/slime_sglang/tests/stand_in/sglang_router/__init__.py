"""A package that stands in for sglang-router: its launcher's two modules, and a router that speaks its wire."""
