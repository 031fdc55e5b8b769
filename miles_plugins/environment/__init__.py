"""Environments, one module a name; rewards they share are in `rewards`."""
