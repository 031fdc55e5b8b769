#!/bin/bash
set -e
cat > backup.sh <<'END'
dir=${1%/}
[ -d "$dir" ] || exit 2
cd "$(dirname "$dir")" || exit 2
name=$(basename "$dir")
find "$name" -type f -name '*.txt' -print0 | tar --null -czf "$name.tar.gz" -T -
find "$name" -type f -name '*.txt' -printf x | wc -c
END
