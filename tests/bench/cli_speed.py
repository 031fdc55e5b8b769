"""How long `miles plugins list` and `miles check` take in fresh processes, and whether listing
imports torch.

    python tests/bench/cli_speed.py [--repeats 7] [--json FILE]

Limits: `miles plugins list` under 0.6 s and without torch; `miles check` of the default run under
3 s. The figure is the median wall-clock of the installed command, after one run that fills the
file cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

COMMANDS = (("miles plugins list", ("plugins", "list"), 0.6), ("miles check", ("check",), 3.0))
HEAVY = ("torch", "transformers", "ray", "sglang")
SCRIPT = Path(sys.executable).parent / "miles"


def seconds(arguments: Sequence[str]) -> float:
    """Wall-clock of one fresh process; its failure is ours."""
    begin = time.perf_counter()
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"miles {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        )
    return time.perf_counter() - begin


def heavy_imports(arguments: Sequence[str]) -> list[str]:
    """Which of the heavy packages the command imports, asked of a fresh process."""
    code = (
        "import contextlib, io, sys\n"
        "from miles.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    main({list(arguments)!r})\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    result = {}
    print(f"{'command':<20} {'median s':>9} {'limit s':>8}  heavy imports")
    for name, arguments, limit in COMMANDS:
        seconds(arguments)
        middle = statistics.median(seconds(arguments) for _ in range(args.repeats))
        heavy = heavy_imports(arguments)
        print(f"{name:<20} {middle:>9.3f} {limit:>8.1f}  {' '.join(heavy) or 'none'}")
        result[name] = {"median_s": middle, "limit_s": limit, "heavy_imports": heavy}
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    late = any(one["median_s"] >= one["limit_s"] for one in result.values())
    return 1 if late or result["miles plugins list"]["heavy_imports"] else 0


if __name__ == "__main__":
    sys.exit(main())
