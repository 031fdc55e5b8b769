#!/bin/bash
set -e
cd bin
for file in *; do
  if [ "$(head -c 2 -- "$file")" = '#!' ]; then
    chmod u+x -- "$file"
    printf '%s\n' "$file"
  else
    chmod u-x -- "$file"
  fi
done | LC_ALL=C sort > ../scripts.txt
