"""`python -m fxkit`: see `fxkit.cli`."""

from __future__ import annotations

import sys

from fxkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
