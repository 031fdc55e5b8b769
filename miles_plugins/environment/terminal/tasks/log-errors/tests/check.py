"""Tests of log-errors: errors with codes, sorted, and nothing else."""

from checking import expect, finish, lines

wanted = [
    "time,part,code",
    "2024-03-01T09:59:59,web,404",
    "2024-03-01T10:00:05,db,17",
    "2024-03-01T10:01:00,db,18",
]
expect("errors.csv", lines("errors.csv"), wanted)
finish()
