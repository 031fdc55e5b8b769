"""Tests of transpose: tables of all shapes."""

from checking import expect, finish, run

for given, wanted in (
    ("a,b,c\n1,2\n", "a,1\nb,2\nc,\n"),
    ("x\n", "x\n"),
    ('"a,1","b""2"\n', '"a,1"\n"b""2"\n'),
    ("", ""),
    ("1,2\n3,4\n5,6\n", "1,3,5\n2,4,6\n"),
):
    done = run("python3", "transpose.py", stdin=given)
    expect(f"output for {given!r}", (done.stdout, done.returncode), (wanted, 0))
finish()
