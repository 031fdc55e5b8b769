"""Tests of json-flatten: nested documents become flat ones."""

import json

from checking import expect, finish, run

for given, wanted in (
    ({"a": {"b": [1, {"c": None}]}}, {"a.b.0": 1, "a.b.1.c": None}),
    ({"x": 1, "y": {}, "z": [], "w": {"v": []}}, {"x": 1}),
    ([["p"], {"q": True}], {"0.0": "p", "1.q": True}),
    ({}, {}),
    ({"b": "ü", "a": [[0.5]]}, {"a.0.0": 0.5, "b": "ü"}),
):
    done = run("python3", "flatten.py", stdin=json.dumps(given))
    found = json.loads(done.stdout or "null")
    expect(f"flat form of {given}", found, wanted)
    expect(f"order of keys of {given}", list(found or {}), sorted(wanted))
    expect(f"lines for {given}", done.stdout.count("\n"), 1)
finish()
