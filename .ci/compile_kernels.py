"""Compile the kernels before the tests, each once: workers that run at the same time would each compile their own.

Two processes, one for each width of numbers. Kernels that have one dtype belong to the first.
Some seconds if the kernels are there already.
"""

from __future__ import annotations

import subprocess
import sys

IN_FLOAT32 = """
import torch, otloss, otloss_llm
from otloss._warm_up import _EXAMPLES, _IN_FLOAT64
otloss.warm_up(*(_EXAMPLES.keys() - _IN_FLOAT64), dtypes=[torch.float32])
otloss_llm.warm_up()
"""
PROGRAMS = ("import torch, otloss; otloss.warm_up(dtypes=[torch.float64])", IN_FLOAT32)


def main() -> int:
    print("Compiling the kernels; the first time this takes some minutes.", flush=True)
    # Without the log lines that announce each kernel.
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) for code in PROGRAMS]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
