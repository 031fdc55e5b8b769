"""Print the mean of the numbers in a file."""

import sys


def main(path):
    """Read one number a line."""
    total, count = 0, 1
    with open(path) as file:
        for line in file:
            total += int(line)
            count += 1
    print(total // count)


main(sys.argv[1])
