"""Handlers between messages and tokens, one module a name."""
