#!/bin/bash
set -e
{ printf 'name\torders\ttotal\n'
  awk -F'\t' 'FNR == 1 { next } NR == FNR { n[$2]++; sum[$2] += $3; next }
    { printf "%s\t%d\t%.2f\n", $2, n[$1], sum[$1] / 100 }' orders.tsv users.tsv |
    LC_ALL=C sort -t "$(printf '\t')" -k3,3nr -k1,1; } > report.tsv
