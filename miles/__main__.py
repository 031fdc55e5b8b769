"""`python -m miles` is the `miles` command; it adds nothing."""

import sys

from miles.cli import main

sys.exit(main())
