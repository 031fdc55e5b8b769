#!/bin/bash
set -e
python3 - <<'END'
import csv
import json
from collections import defaultdict

totals = defaultdict(float)
with open("sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        totals[row["region"]] += float(row["amount"])
with open("totals.json", "w") as file:
    json.dump({region: round(total, 2) for region, total in totals.items()}, file)
END
