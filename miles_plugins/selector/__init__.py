"""Selectors, one module a name."""
