#!/bin/bash
set -e
awk -F, -v OFS=, 'NR == 1 { $2 = "temp_c" } NR > 1 && $2 != "" {
  $2 = sprintf("%.1f", ($2 - 32) * 5 / 9); if ($2 == "-0.0") $2 = "0.0" } { print }' weather.csv > weather_c.csv
