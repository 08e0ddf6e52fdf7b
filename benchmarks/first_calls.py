"""Seconds of the first call of a function in a process, with an empty cache of numba kernels and with a filled one.

Value and gradient of a batch of small problems, in seconds of the processor on all threads of the process, which other
processes hardly change; the time includes the import of numba but not of torch or otloss. Each kernel is compiled at
its first call with each dtype and kept on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from statistics import median

from benchmarks.measure import Settings, heading, keep, say, table

NAME, ROUNDS, LIMIT = "first_calls", 3, 8.0
SETUP = """
import sys, time, torch, otloss
from otloss.costs import PointCost
dtype = getattr(torch, sys.argv[1])
x, y = torch.rand(16, 50, 2, dtype=dtype, requires_grad=True), torch.rand(16, 60, 2, dtype=dtype) + 1
p, q = (torch.full((16, n), 1 / n, dtype=dtype, requires_grad=True) for n in (50, 60))
costs = torch.cdist(x.detach(), y).requires_grad_()
logits, labels = torch.randn(4000, 5, dtype=dtype, requires_grad=True), torch.randint(5, (4000,))
w, z = torch.full((200, 100), 0.01, dtype=dtype), torch.rand(200, 100, dtype=dtype, requires_grad=True)
begin = time.process_time()
"""
CALLS = {
    "emd": "otloss.emd(p, q, costs).sum().backward()",
    "sinkhorn": "otloss.sinkhorn(p, q, costs, epsilon=0.05).sum().backward()",
    "solve, exact": "t = otloss.solve(p, q, costs); t.value.sum().backward(); t.gap",
    "solve, entropic, with its gap": (
        "t = otloss.solve(p, q, PointCost(x, y), epsilon=0.05); t.value.sum().backward(); t.gap"
    ),
    "sinkhorn_divergence": "otloss.sinkhorn_divergence(p, q, PointCost(x, y), epsilon=0.05).sum().backward()",
    "cloud_loss": "otloss.cloud_loss(x, y, blur=0.1).sum().backward()",
    "register": "otloss.register(x[0].detach(), y[0], epsilon=0.1, steps=3)",
    "wasserstein_1d": "otloss.wasserstein_1d(w, w, z, z.detach() + 1, order=2).sum().backward()",
    "ordinal_loss": "otloss.ordinal_loss(logits, labels).backward()",
    "linear_token_loss, EMO": (
        "import otloss_llm as llm; head = torch.randn(2000, 64); hidden = torch.randn(600, 64, requires_grad=True); "
        "begin = time.process_time(); llm.linear_token_loss(hidden, head, torch.arange(600), objective=llm.EMO(), "
        "cost=llm.EmbeddingCost(head)).loss.backward()"
    ),
}  # fmt: skip


def main(settings: Settings) -> None:
    rounds = settings.rounds or (1 if settings.small else ROUNDS)
    calls = {"emd": CALLS["emd"]} if settings.small else CALLS
    for dtype in ("float32",) if settings.small else ("float32", "float64"):
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                results[name].append(_seconds(call, dtype))
        heading(NAME, f"first calls, {dtype}", f"{rounds} rounds")
        lines, kept = [("call", "compiling", "compiled before", f"at most {LIMIT:g} s")], []
        for name, pairs in results.items():
            cold, warm = (median(side) for side in zip(*pairs, strict=True))
            lines.append((name, f"{cold:.1f} s", f"{warm:.2f} s", "yes" if cold <= LIMIT else "no"))
            kept += [{"name": f"{name}, {state}", "seconds": f"{value:.3f}", "rounds": rounds}
                     for state, value in (("compiling", cold), ("compiled before", warm))]  # fmt: skip
        table(lines)
        keep(settings.output, NAME, dtype, kept)


def _seconds(call: str, dtype: str) -> tuple[float, float]:
    """The first call in a process with an empty cache, and in a second process with the cache of the first."""
    code = f"{SETUP}{call}\nprint(time.process_time() - begin)"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        done = [
            subprocess.run(
                [sys.executable, "-c", code, dtype], env=environment, capture_output=True, text=True, check=False
            )
            for _ in range(2)
        ]
    for process in done:
        if process.returncode:
            say(process.stderr)
            raise RuntimeError(
                f"the process of {call!r} ended with exit code {process.returncode}, see its error above"
            )
    cold, warm = (float(process.stdout.split()[-1]) for process in done)
    return cold, warm


if __name__ == "__main__":
    main(Settings())
