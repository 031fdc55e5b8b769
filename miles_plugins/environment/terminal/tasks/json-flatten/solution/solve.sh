#!/bin/bash
set -e
cat > flatten.py <<'END'
import json
import sys


def walk(value, path):
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield ".".join(path), value
        return
    for key, inner in items:
        yield from walk(inner, [*path, str(key)])


print(json.dumps(dict(sorted(walk(json.load(sys.stdin), [])))))
END
