"""The supervisor as code for a box's interpreter: compiled once by that very interpreter, because a
box then loads it in a fraction of the time that its text takes.

What the code does is in `inside`.
"""

from __future__ import annotations

import subprocess
from functools import lru_cache
from pathlib import Path

from miles import SandboxError

__all__ = ["compiled"]

_PACKAGE = "miles_plugins.sandbox.inside"
_MODULES = ("processes", "commands", "supervisor")  # each imports only those before it
_COMPILE = """
import marshal, sys
given = marshal.loads(sys.stdin.buffer.read())
code = [(name, compile(text, "<%s>" % name, "exec", 0, True, 2)) for name, text in given]
sys.stdout.buffer.write(marshal.dumps(code))
"""


@lru_cache(maxsize=16)
def compiled(python: str, title: str) -> bytes:
    """Marshalled `(module name, code)` pairs, for `python` alone. Takes a moment when first asked.

    Raises `SandboxError` when the interpreter does not run.
    """
    import marshal

    folder = Path(__file__).parent / "inside"
    try:
        given = [(f"{_PACKAGE}.{m}", (folder / f"{m}.py").read_text("utf-8")) for m in _MODULES]
        ran = subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE],
            input=marshal.dumps(given, 2),
            capture_output=True,
            timeout=60,
            check=False,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{title}: the interpreter {python} does not run: {error}") from error
    if ran.returncode:
        words = ran.stderr.decode(errors="replace").strip()[-400:]
        raise SandboxError(f"{title}: {python} cannot compile the supervisor: {words}")
    return ran.stdout
