#!/bin/bash
mkdir -p /logs/verifier
if [ "$(tr '\n' ' ' < /app/sorted.txt)" = "3 7 12 45 " ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
