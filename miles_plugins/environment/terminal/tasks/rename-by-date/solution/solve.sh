#!/bin/bash
set -e
cd notes
for file in *.txt; do
  date=$(sed -n '1s/^Date: //p' "$file")
  n=1
  while [ -e "$date-$n.txt" ]; do n=$((n + 1)); done
  mv "$file" "$date-$n.txt"
done
