"""Tests of last-lines: order and endings."""

from checking import expect, finish, run

for given, wanted in (
    ("b\na\nb\nc\na\n", "b\nc\na\n"),
    ("x\nx\nx", "x\n"),
    ("", ""),
    ("\n\na\n\n", "a\n\n"),
    ("a \na\n", "a \na\n"),
):
    done = run("python3", "lastly.py", stdin=given)
    expect(f"output for {given!r}", (done.stdout, done.returncode), (wanted, 0))
finish()
