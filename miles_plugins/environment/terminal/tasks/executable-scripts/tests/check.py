"""Tests of executable-scripts: permissions, names, contents."""

import os

from checking import expect, finish, lines, names, text

scripts = ["odd name", "start", "stop.sh"]
expect("names in bin", names("bin"), ["odd name", "readme", "start", "stop.sh"])
for name in names("bin"):
    executable = bool(os.stat(f"bin/{name}").st_mode & 0o100)
    expect(f"bin/{name} is executable", executable, name in scripts)
    expect(f"bin/{name} begins with #!", text(f"bin/{name}").startswith("#!"), name in scripts)
expect("scripts.txt", lines("scripts.txt"), scripts)
finish()
