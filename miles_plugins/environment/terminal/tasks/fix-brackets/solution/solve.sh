#!/bin/bash
set -e
cat > brackets.py <<'END'
"""Say whether the brackets of a text are balanced."""

import sys

pairs = {")": "(", "]": "[", "}": "{"}
waiting, fault = [], None
for number, line in enumerate(sys.stdin.read().split("\n"), 1):
    for column, letter in enumerate(line, 1):
        if letter in pairs.values():
            waiting.append((letter, f"{number}:{column}"))
        elif letter in pairs and fault is None:
            if not waiting or waiting.pop()[0] != pairs[letter]:
                fault = f"{number}:{column}"
print(fault or (waiting[-1][1] if waiting else "ok"))
END
