"""Simulate a cache that keeps the keys used most recently."""

import sys


def main(size):
    """Read commands, print what they get."""
    held = {}
    for line in sys.stdin:
        command, key, *rest = line.split()
        if command == "set":
            if len(held) == size:
                del held[min(held)]
            held[key] = rest[0]
        else:
            print(held.get(key, "-"))


main(int(sys.argv[1]))
