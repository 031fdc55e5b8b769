#!/bin/bash
set -e
cat > cache.py <<'END'
"""Simulate a cache that keeps the keys used most recently."""

import sys

size, held = int(sys.argv[1]), {}
for line in sys.stdin:
    command, key, *rest = line.split()
    if command == "set":
        held.pop(key, None)
        if len(held) == size:
            del held[next(iter(held))]
        held[key] = rest[0]
    elif key in held:
        held[key] = held.pop(key)
        print(held[key])
    else:
        print("-")
END
