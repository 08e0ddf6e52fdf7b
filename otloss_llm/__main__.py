"""`python -m otloss_llm`."""

import sys

from otloss_llm.cli import main

sys.exit(main())
