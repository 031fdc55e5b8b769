#!/bin/bash
set -e
python3 - <<'END'
import json
import re

found, section = {}, None
for line in open("settings.ini"):
    line = line.strip()
    if not line or line[0] in "#;":
        continue
    if line[0] == "[":
        section = found.setdefault(line[1:-1], {})
        continue
    key, _, value = (part.strip() for part in line.partition("="))
    if re.fullmatch(r"[-+]?\d+", value):
        value = int(value)
    elif value.lower() in ("true", "false"):
        value = value.lower() == "true"
    section[key] = value
json.dump(found, open("settings.json", "w"))
END
