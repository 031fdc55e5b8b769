"""Say whether the brackets of a text are balanced."""

import sys

said = sys.stdin.read()
balanced = all(said.count(a) == said.count(b) for a, b in ("()", "[]", "{}"))
print("ok" if balanced else "1:1")
