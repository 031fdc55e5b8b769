"""`python -m miles` is the `miles` command, without the folder that it is started in."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # workers would lack what the driver found there

from miles.cli import main

sys.exit(main())
