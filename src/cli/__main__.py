"""``python -m epicute.cli`` is ``epicute``."""

import sys

from epicute.cli import main

if __name__ == "__main__":
    sys.exit(main())
