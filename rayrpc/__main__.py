"""``python -m rayrpc``."""

import sys

from rayrpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
