"""`python -m benchmarks.paper`, see `benchmarks.paper.experiments`."""

import sys

from benchmarks.paper.experiments import main

if __name__ == "__main__":
    sys.exit(main())
