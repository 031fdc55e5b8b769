"""Tests of fix-cache: which keys are there after which uses."""

from checking import expect, finish, run

for size, commands, wanted in (
    (2, "set b 1|set a 2|get b|set c 3|get a|get b|get c", "1 - 1 3"),
    (2, "set a 1|set b 2|set a 9|set c 3|get a|get b", "9 -"),
    (1, "set a 1|get a|set b 2|get a|get b", "1 - 2"),
    (3, "get x|set z 1|set y 2|set x 3|get z|set w 4|get y|get z", "- 1 - 1"),
):
    given = commands.replace("|", "\n") + "\n"
    done = run("python3", "cache.py", str(size), stdin=given)
    expect(f"output of {commands}", done.stdout.split(), wanted.split())
finish()
