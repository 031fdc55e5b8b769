"""Print a number as a Roman numeral."""

import sys

LETTERS = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]


def roman(number):
    """The numeral of a number."""
    said = ""
    for value, letter in LETTERS:
        while number >= value:
            said += letter
            number -= value
    return said


print(roman(int(sys.argv[1])))
