"""Seconds and kernels of first calls in a process, with an empty cache of numba kernels and with a filled one.

Value and gradient of small problems, README's blocks, and loops of training steps of one shape, each in a process of
its own. Seconds are of the processor on all threads of the process, which other processes hardly change; a call that
waits for its kernel takes longer by the clock, which is named beside. They include the import of numba, but not of
torch, otloss and what else the code imports. Kernels are counted by the log lines of the logger "otloss", also by
other processes. These processes end before the second measurement, and their seconds are named beside. A loop is to
compile all that it needs at its first step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.measure import SMALL_SIZES, Limit, Settings, heading, keep, say, table

NAME, ROUNDS = "first_calls", 1
LIMIT, WARM_LIMIT = 8.0, 0.4  # seconds
LIMITS = {"emd": 3.0, "sinkhorn": 4.0, "cloud_loss, 32 x 512 x 3": 6.0}  # seconds of a call
ROOT = Path(__file__).parents[1]
STEPS = 200
IMPORT = re.compile(r"^(?:from|import) (\w+).*$", re.MULTILINE)
PROGRAM = """
import logging, re, resource, sys, time, warnings
import numpy as np, torch, otloss
{imports}
from otloss.costs import GridCost, PointCost

class Kernels(logging.Handler):
    count = at_first_step = elsewhere = announced = 0

    def emit(self, record):
        self.announced += sum(map(int, re.findall("takes about ([0-9]+) s", record.getMessage())))
        self.count += record.getMessage().startswith("compiled the CPU kernel")
        self.elsewhere += "in another process" in record.getMessage()

warnings.simplefilter("ignore")
kernels = Kernels()
logging.getLogger("otloss").addHandler(kernels)
logging.getLogger("otloss").setLevel(logging.INFO)
torch.manual_seed(0)
def rand(*shape, **options):
    return torch.rand(shape, requires_grad=True, **options)
p, q = torch.rand(8, 64).softmax(-1).requires_grad_(), torch.rand(8, 64).softmax(-1).requires_grad_()
x, y, costs = rand(16, 50, 2), torch.rand(16, 60, 2) + 1, rand(8, 64, 64)
begin, begin_by_clock = time.process_time(), time.perf_counter()
{code}
seconds, by_clock = time.process_time() - begin, time.perf_counter() - begin_by_clock
from otloss._numba.background import _compilations
for compilation in _compilations.values():
    for process in compilation.processes:
        process.wait()
others = resource.getrusage(resource.RUSAGE_CHILDREN)
print()
print(seconds, by_clock, others.ru_utime + others.ru_stime,
      kernels.count, kernels.at_first_step, kernels.elsewhere, kernels.announced)
"""
CALLS = {
    "emd": "otloss.emd(p, q, costs).sum().backward()",
    "sinkhorn": "otloss.sinkhorn(p, q, costs, epsilon=0.05).sum().backward()",
    "sinkhorn, unbalanced": "otloss.sinkhorn(p, q, costs, epsilon=0.05, marginal_penalty=1.0).sum().backward()",
    "solve, exact": "t = otloss.solve(p, q, costs); t.value.sum().backward(); t.gap",
    "solve, entropic, with its gap":
        "t = otloss.solve(None, None, PointCost(x, y), epsilon=0.05); t.value.sum().backward(); t.gap",
    "sinkhorn_divergence": "otloss.sinkhorn_divergence(None, None, PointCost(x, y), epsilon=0.05).sum().backward()",
    "sinkhorn_divergence, image 32 x 32":
        "a, b = rand(1024).softmax(-1), rand(1024).softmax(-1)\n"
        "otloss.sinkhorn_divergence(a, b, GridCost((32, 32), spacing=1 / 32), epsilon=0.005).backward()",
    "cloud_loss, 16 x 50 x 2": "otloss.cloud_loss(x, y, blur=0.1).sum().backward()",
    "cloud_loss, 32 x 512 x 3": "z = torch.rand(32, 512, 3)\n"
        "otloss.cloud_loss(rand(32, 512, 3), z, blur=0.05).sum().backward()",
    "barycenter": "otloss.barycenter(p.double(), GridCost((8, 8)), epsilon=1.0).sum().backward()",
    "match": "otloss.match(costs.detach())",
    "register": "otloss.register(x[0].detach(), y[0], epsilon=0.1, steps=3)",
    "wasserstein_1d": "a = torch.full((200, 100), 0.01)\n"
        "otloss.wasserstein_1d(a, a, rand(200, 100), torch.rand(200, 100) + 1, order=2).sum().backward()",
    "sliced_wasserstein": "otloss.sliced_wasserstein(rand(500, 3), torch.rand(500, 3)).backward()",
    "ordinal_loss": "otloss.ordinal_loss(rand(4000, 5), torch.randint(5, (4000,))).backward()",
    "xgboost_objective": "from otloss.boosting import xgboost_objective\n"
        "xgboost_objective(5, interface='sklearn')(np.arange(4000) % 5, np.zeros((4000, 5), np.float32))",
    "document_search": "corpus = torch.rand(50, 300) * (torch.rand(50, 300) < 0.1)\n"
        "otloss.document_search(corpus[0], corpus, torch.rand(300, 20), k=3)",
    "fused_gromov": "a = torch.cdist(x[0], x[0]).detach()\notloss.fused_gromov(a, a, a)",
    "soft_rank": "otloss.soft_rank(rand(64, 100), epsilon=0.1).sum().backward()",
    "linear_token_loss, EMO": "import otloss_llm as llm\nhead = torch.randn(2000, 64)\n"
        "llm.linear_token_loss(rand(600, 64), head, torch.arange(600), objective=llm.EMO(), "
        "cost=llm.EmbeddingCost(head)).loss.backward()",
}  # fmt: skip
LOOP = "for step in range({steps}):\n{body}\n    if step == 0: kernels.at_first_step = kernels.count"
LOOPS = {
    "cloud_loss, points that move": """
    x.grad = None
    otloss.cloud_loss(x, y, blur=0.05).sum().backward()
    with torch.no_grad():
        x -= 2 * x.grad  # a tenth of the way, as each point has a weight of 1 / 50""",
    "emd, equal weights, costs that change": """
    costs = torch.cdist(torch.rand(8, 64, 2), torch.rand(8, 64, 2)).requires_grad_()
    if step % 3 == 0:  # with ties
        costs = (8 * costs.detach()).round().requires_grad_()
    otloss.emd(None, None, costs).sum().backward()""",
}


class First(NamedTuple):
    """What a process took.

    Attributes:
        seconds, of_others: of the processor, for the process and for those that compiled for it.
        by_clock: the seconds that the call took.
        kernels, at_first_step: that it compiled, and those among them of the first step of a loop.
        elsewhere: how often another process compiled.
        announced: the seconds for kernels that log lines announced.
    """

    seconds: float
    by_clock: float
    of_others: float
    kernels: int
    at_first_step: int
    elsewhere: int
    announced: int

    @property
    def note(self) -> str:
        here = f"{self.by_clock:.1f} s by the clock, {self.kernels} kernels compiled"
        others = f", {self.elsewhere} in other processes for {self.of_others:.1f} s" if self.elsewhere else ""
        return here + others + (f", {self.announced} s announced" if self.announced else "")


def main(settings: Settings) -> None:
    rounds = settings.rounds or ROUNDS
    heading(NAME, "first calls, float32", f"{rounds} rounds")
    codes, skipped = _codes(small=settings.small)
    verdicts, kept = list[list[str]](), list[dict[str, object]]()
    for name, code in codes.items():
        cold, warm = zip(*(_first_calls(code) for _ in range(rounds)), strict=True)
        seconds = [median(one.seconds for one in side) for side in (cold, warm)]
        say(f"  {name:<42} {seconds[0]:5.1f} s, {cold[0].note}; {seconds[1]:.2f} s with these")
        if name.startswith("loop"):
            late = cold[0].kernels - cold[0].at_first_step
            verdicts.append(Limit(f"{name}: kernels after the first step", 0).verdict(late))
            kept.append(_row(f"{name}, after the first step", rounds, note=f"{late} kernels compiled"))
        else:
            verdicts.append(Limit(f"{name}, compiling, s", LIMITS.get(name, LIMIT)).verdict(seconds[0]))
            if not name.startswith("README"):
                verdicts.append(Limit(f"{name}, compiled before, s", WARM_LIMIT).verdict(seconds[1]))
        kept += [_row(f"{name}, compiling", rounds, seconds[0], note=cold[0].note),
                 _row(f"{name}, compiled before", rounds, seconds[1], note=warm[0].note)]  # fmt: skip
    say("\n".join(skipped))
    if settings.small:
        say(SMALL_SIZES)
    else:
        table([["first call", "limit", "measured"], *verdicts])
    keep(settings.output, NAME, "float32", kept)


def _row(name: str, rounds: int, seconds: float | None = None, *, note: str) -> dict[str, object]:
    shown = {} if seconds is None else {"seconds": f"{seconds:.3f}"}
    return {"name": name, **shown, "error": note, "rounds": rounds}


def _codes(*, small: bool) -> tuple[dict[str, str], list[str]]:
    """The code of each row, and a line for each block of README.md whose packages are not here."""
    if small:
        return {"loop, ordinal_loss": _loop(f"    {CALLS['ordinal_loss']}", 2)}, []
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    missing = {f"README, block {i}": _missing_packages(block) for i, block in enumerate(blocks, start=1)}
    run = {name: block for (name, lacks), block in zip(missing.items(), blocks, strict=True) if not lacks}
    loops = {f"loop, {name}": _loop(body, STEPS) for name, body in LOOPS.items()}
    return CALLS | run | loops, [f"{name} is left out: {lacks} not here" for name, lacks in missing.items() if lacks]


def _loop(body: str, steps: int) -> str:
    return LOOP.format(steps=steps, body=body)


def _missing_packages(code: str) -> str:
    packages = dict.fromkeys(one[1] for one in IMPORT.finditer(code))
    return ", ".join(package for package in packages if find_spec(package) is None)


def _first_calls(code: str) -> list[First]:
    """A process with an empty cache, and a second one with the cache of the first."""
    imports = "\n".join(one[0] for one in IMPORT.finditer(code))  # before the clock starts; later they take no time
    program = PROGRAM.format(imports=imports, code=code)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/cache", "PYTHONPATH": paths}
        return [_run(program, code, folder, environment) for _ in range(2)]


def _run(program: str, code: str, folder: str, environment: dict[str, str]) -> First:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        say(done.stderr)
        raise RuntimeError(f"the process of {code!r} ended with exit code {done.returncode}, see its error above")
    seconds, by_clock, of_others, *counts = done.stdout.split()[-7:]
    return First(float(seconds), float(by_clock), float(of_others), *map(int, counts))


if __name__ == "__main__":
    main(Settings())
