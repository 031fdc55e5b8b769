#!/bin/bash
set -e
cat > merge.py <<'END'
import json
import sys


def merge(base, override):
    if not isinstance(override, dict):
        return override
    found = dict(base) if isinstance(base, dict) else {}
    for key, value in override.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merge(found.get(key), value)
    return found


with open(sys.argv[1]) as one, open(sys.argv[2]) as two:
    print(json.dumps(merge(json.load(one), json.load(two)), indent=2, sort_keys=True))
END
