"""`python -m benchmarks.paper [options]`, see `benchmarks.paper.command`."""

import sys

from benchmarks.paper.command import main

if __name__ == "__main__":
    sys.exit(main())
