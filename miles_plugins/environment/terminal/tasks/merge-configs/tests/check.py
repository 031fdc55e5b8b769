"""Tests of merge-configs: merging, replacing and removing."""

import json

from checking import expect, finish, run, write

for base, override, wanted in (
    ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": None, "e": 4}}, {"a": 1, "b": {"d": 3, "e": 4}}),
    ({"a": {"b": 1}}, {"a": 7}, {"a": 7}),
    ({"a": 7}, {"a": {"b": 1, "c": None}}, {"a": {"b": 1}}),
    ({"a": [1, 2], "n": None}, {"a": [3]}, {"a": [3], "n": None}),
    ({}, {}, {}),
    ({"z": 1}, {"y": None}, {"z": 1}),
):
    write("one.json", json.dumps(base))
    write("two.json", json.dumps(override))
    found = run("python3", "merge.py", "one.json", "two.json").stdout.strip()
    expect(f"{base} with {override}", found, json.dumps(wanted, indent=2, sort_keys=True))
finish()
