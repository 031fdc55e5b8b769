"""Tests of join-tables: every user with sums, in order."""

from checking import expect, finish, lines

rows = ["name orders total", "Ada 2 13.00", "Bob_Ray 1 13.00", "Zoe 1 0.99", "Cyd 0 0.00"]
wanted = ["\t".join(part.replace("_", " ") for part in row.split(" ")) for row in rows]
expect("report.tsv", lines("report.tsv"), wanted)
finish()
