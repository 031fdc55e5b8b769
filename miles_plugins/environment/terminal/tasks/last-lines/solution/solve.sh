#!/bin/bash
set -e
cat > lastly.py <<'END'
import sys

seen = {}
for line in sys.stdin.read().splitlines():
    seen.pop(line, None)
    seen[line] = None
for line in seen:
    print(line)
END
