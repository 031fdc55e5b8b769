#!/bin/bash
set -e
cat > roman.py <<'END'
"""Print a number as a Roman numeral."""

import sys

PARTS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L")]
PARTS += [(40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]

try:
    number = int(sys.argv[1])
except ValueError:
    number = 0
if not 1 <= number <= 3999:
    print("error", file=sys.stderr)
    sys.exit(2)
said = ""
for value, letters in PARTS:
    while number >= value:
        said, number = said + letters, number - value
print(said)
END
