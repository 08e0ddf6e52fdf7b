"""Compile the kernels before the tests, each once: workers that run at the same time would each compile their own.

Two processes, one for each width of numbers. Some seconds if the kernels are there already.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAMS = (
    "import torch, otloss; otloss.warm_up(dtypes=[torch.float64])",
    "import torch, otloss, otloss_llm; otloss.warm_up(dtypes=[torch.float32]); otloss_llm.warm_up()",
)


def main() -> int:
    print("Compiling the kernels; the first time this takes about a minute.", flush=True)
    # Without the log lines that announce each kernel.
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for code in PROGRAMS]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
