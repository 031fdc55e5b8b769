"""Tests of remove-duplicates: one file of each content is left, the right one."""

from pathlib import Path

from checking import expect, finish

found = sorted(str(p.relative_to("data")) for p in Path("data").rglob("*") if p.is_file())
expect("files below data", found, ["B.txt", "b/three.txt", "c/w.bin", "empty one.txt"])
kept = {name: (Path("data") / name).read_text() for name in found}
wanted = {"B.txt": "same\n", "b/three.txt": "different\n", "c/w.bin": "0101\n", "empty one.txt": ""}
expect("what they hold", kept, wanted)
finish()
