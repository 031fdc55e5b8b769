#!/bin/bash
set -e
cat > transpose.py <<'END'
import csv
import sys
from itertools import zip_longest

rows = list(csv.reader(sys.stdin))
out = csv.writer(sys.stdout, lineterminator="\n")
out.writerows(zip_longest(*rows, fillvalue=""))
END
