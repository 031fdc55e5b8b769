#!/bin/bash
set -e
{ echo time,part,code
  sed -nE 's/^([^ ]+) ERROR \[([a-z]+)\] (.* )?code=([0-9]+)( .*)?$/\1,\2,\4/p' app.log | sort; } > errors.csv
