"""Tests of celsius: every row, in order."""

from checking import expect, finish, lines

wanted = (
    "city,temp_c,wind Oslo,-10.0,3 Lima,20.3,1.50 Cairo,,2 Nome,-40.0,10 Bern,0.0,0 Turku,0.0,4"
)
expect("weather_c.csv", lines("weather_c.csv"), wanted.split())
finish()
