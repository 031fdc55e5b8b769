#!/bin/bash
set -e
cat > average.py <<'END'
"""Print the mean of the numbers in a file."""

import sys

with open(sys.argv[1]) as file:
    numbers = [float(line) for line in file if line.strip()]
if not numbers:
    print("no numbers")
    sys.exit(1)
print(f"{sum(numbers) / len(numbers):.2f}")
END
