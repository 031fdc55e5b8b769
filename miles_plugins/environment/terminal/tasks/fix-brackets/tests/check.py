"""Tests of fix-brackets: balanced texts and the places of faults."""

from checking import expect, finish, run

for given, wanted in (
    ("a(b[c]{d})", "ok"),
    ("", "ok"),
    ("(]", "1:2"),
    ("x\n  )(", "2:3"),
    ("{\n [ (\n", "2:4"),
    ("([)]", "1:3"),
    ("(()\n", "1:1"),
    ("ü}", "1:2"),
):
    done = run("python3", "brackets.py", stdin=given)
    expect(f"output for {given!r}", done.stdout, f"{wanted}\n")
finish()
