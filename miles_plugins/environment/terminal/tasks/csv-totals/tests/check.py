"""Tests of csv-totals: every region has its sum."""

from checking import expect, finish, json_of

expect("totals.json", json_of("totals.json"), {"north": 110.0, "south": 10.25, "east": 0.99})
finish()
