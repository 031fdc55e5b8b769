"""Tests of fix-roman: numerals all over the range, and what is out of it."""

from checking import expect, finish, run

GOOD = {"1": "I", "4": "IV", "9": "IX", "14": "XIV", "40": "XL", "90": "XC", "400": "CD"}
GOOD |= {"944": "CMXLIV", "1987": "MCMLXXXVII", "2024": "MMXXIV", "3999": "MMMCMXCIX"}
for number, numeral in GOOD.items():
    expect(f"numeral of {number}", run("python3", "roman.py", number).stdout, f"{numeral}\n")
for number in ("0", "-1", "4000", "ten", "1.5"):
    done = run("python3", "roman.py", number)
    expect(f"exit code for {number}", (done.stdout, done.returncode), ("", 2))
    expect(f"error for {number}", done.stderr.strip(), "error")
finish()
