#!/bin/bash
set -e
cat > longest.sh <<'END'
# Print the name of the largest file in a folder.
best=
size=-1
for file in "$1"/*; do
  [ -f "$file" ] || continue
  bytes=$(wc -c < "$file")
  if [ "$bytes" -gt "$size" ]; then
    best=${file##*/}
    size=$bytes
  fi
done
[ "$size" -ge 0 ] || exit 1
printf '%s\n' "$best"
END
