"""Reasoning Gym's procedural tasks as an environment for miles; see `environment`."""
