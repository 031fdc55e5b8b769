#!/bin/bash
set -e
grep -rhoE '[A-Za-z0-9._+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+' mail | tr 'A-Z' 'a-z' |
  LC_ALL=C sort -u > emails.txt
