"""Tests of fix-average: means of files that the task did not show."""

from checking import expect, finish, run, write

for content, wanted, code in (
    ("3\n4.5\n\n-1\n", "2.17\n", 0),
    ("1\n", "1.00\n", 0),
    ("\n\n  7 \n8\n", "7.50\n", 0),
    ("1e3\n", "1000.00\n", 0),
    ("\n", "no numbers\n", 1),
    ("", "no numbers\n", 1),
):
    write("given.txt", content)
    done = run("python3", "average.py", "given.txt")
    expect(f"output for {content!r}", done.stdout, wanted)
    expect(f"exit code for {content!r}", done.returncode, code)
finish()
