#!/bin/bash
set -e
find data -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | awk '
  { sum = $1; sub(/^[^ ]+ [ *]/, ""); if (sum in seen) print; seen[sum] = 1 }' |
  while IFS= read -r path; do rm -- "$path"; done
