"""Tests of fix-quoting: names with spaces, hidden files, ties, nothing."""

import os

from checking import expect, finish, run, write

write("some dir/a b.txt", "12345")
write("some dir/b.txt", "12345")
write("some dir/.hidden", "1234567890")
write("some dir/sub/large.txt", "1" * 99)
done = run("sh", "longest.sh", "some dir")
expect("largest file", (done.stdout, done.returncode), ("a b.txt\n", 0))
write("some dir/- x  y", "1234567")
expect("a name with a dash", run("sh", "longest.sh", "some dir").stdout, "- x  y\n")
os.makedirs("none", exist_ok=True)
done = run("sh", "longest.sh", "none")
expect("an empty folder", (done.stdout, done.returncode), ("", 1))
finish()
