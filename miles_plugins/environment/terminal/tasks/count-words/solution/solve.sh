#!/bin/bash
set -e
tr 'A-Z' 'a-z' < poem.txt | grep -oE '[a-z]+' | sort | uniq -c | sort -k1,1nr -k2,2 |
  head -5 | awk '{print $2, $1}' > counts.txt
