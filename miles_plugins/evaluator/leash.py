"""`python -m miles_plugins.evaluator.leash N COMMAND ...`: a command that ends with whoever
started it.

The starter holds the other end of standard input. When that closes, however it came to, the whole
process group is killed; it is killed as well when the command has ended, so that nothing of it
stays behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Run the command (after the number of a descriptor, to which its exit code is written)."""
    threading.Thread(target=_watch, daemon=True).start()
    try:
        code = subprocess.run(sys.argv[2:], stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        print(f"cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr, flush=True)
        code = 127
    os.write(int(sys.argv[1]), f"{code}\n".encode())
    _end()


def _watch() -> None:
    while sys.stdin.buffer.read(1):
        pass
    _end()


def _end() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
