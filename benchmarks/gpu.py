"""`python -m benchmarks.gpu`: time and memory of token losses on one large GPU, compared with their goals.

In bfloat16, N = 8192 tokens, V = 128256, d = 4096, forward and backward pass from hidden states and head:

    EMO over our MLE, as called and with the same chunk     at most 1.12
    EMO over dense cross-entropy                            at most 1.2
    EMO over Liger's fused cross-entropy                    at most 0.6, in at most its memory

with a trained head and with a frozen one (LoRA). Liger sums the gradient of the head in bfloat16 by default; ours has
the rounding of the result alone, as Liger's with sums in float32 has, so EMO is compared with both. Seconds are between
CUDA events, medians over interleaved rounds after a warm-up. Memory is the peak of one pass beyond inputs and
gradients; EMO's cost object counts as an input. Before that, loss and gradients are compared with dense float32.
`--dry-run` runs all of it at tiny sizes on the CPU, in Triton's interpreter.

`python -m benchmarks.gpu transport` measures entropic transport instead (`gpu_transport`).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_transport
from benchmarks.contestants import DENSE, PUBLISHED, TORCH, Loss, Problem, dense, liger, ours, published, torch_fused
from benchmarks.contestants import step as pass_of
from benchmarks.inputs import with_inputs
from benchmarks.labels import labels_for, share_distinct
from benchmarks.measure import FOLDER, Limit, Settings, Timing, ratios, report_memory, report_times, say, table
from otloss_llm import EMO, MLE, EmbeddingCost, linear_token_loss
from otloss_llm.kernels import rows_triton
from otloss_llm.objectives import Objective

NAME = "gpu"
LIGER, LIGER_FLOAT32 = "Liger", "Liger, sums in float32"
CHUNKS = (1024, 2048, 4096)
EMO_USED, MLE_USED = "EMO", "MLE"  # as called without impl and chunk_size


@dataclass(frozen=True)
class Size:
    """The size of a problem, and of the smaller one used to check gradients."""

    tokens: int = 8192
    vocab: int = 128256
    width: int = 4096
    checked: tuple[int, int] = (512, 32000)  # tokens, vocabulary
    chunks: tuple[int, ...] = CHUNKS
    device: str = "cuda"

    @property
    def name(self) -> str:
        return f"N={self.tokens} V={self.vocab} d={self.width} bfloat16"

    def problem(self, labels: Tensor, *, vocab: int | None = None) -> Problem:
        return Problem.random(vocab or self.vocab, self.width, labels, dtype=torch.bfloat16, device=self.device)


DRY = Size(tokens=9, vocab=130, width=16, checked=(12, 70), chunks=(4, 8), device="cpu")


def emo_at(chunk: int) -> str:
    return f"EMO chunk={chunk}"


def mle_at(chunk: int) -> str:
    return f"MLE chunk={chunk}"


def contestants(size: Size) -> dict[str, Callable[[], Loss]]:
    """Functions that make each loss; one fails if a package is missing."""
    makers: dict[str, Callable[[], Loss]] = {}
    for chunk in size.chunks:
        makers[emo_at(chunk)] = lambda chunk=chunk: ours(EMO(), impl="triton", chunk=chunk)
        makers[mle_at(chunk)] = lambda chunk=chunk: ours(MLE(), impl="triton", chunk=chunk)
        makers[f"{TORCH} chunk={chunk}"] = lambda chunk=chunk: torch_fused(chunk)
    impl = "auto" if size.device == "cuda" else "triton"
    makers |= {EMO_USED: lambda: ours(EMO(), impl=impl), MLE_USED: lambda: ours(MLE(), impl=impl)}
    makers[f"{TORCH} automatic"] = lambda: torch_fused(None)
    makers |= {LIGER: liger, LIGER_FLOAT32: lambda: liger(torch.float32)}
    return makers | {DENSE: lambda: dense, PUBLISHED: published}


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_losses(size: Size) -> None:
    """Loss and gradients of bfloat16 inputs: at most 1.5 times the error of the dense computation, + eps."""
    tokens, vocab = size.checked
    labels = torch.randint(vocab // 4, (tokens,), generator=torch.Generator().manual_seed(2))  # labels that repeat
    given = size.problem(labels, vocab=vocab)
    hidden, weight = given.hidden.detach(), given.weight.detach()
    for name, objective in (("MLE", MLE()), ("EMO", EMO())):
        exact = _scored(hidden.float(), weight.float(), given.labels, objective, "reference")
        naive = _scored(hidden, weight, given.labels, objective, "reference")
        fused = _scored(hidden, weight, given.labels, objective, "triton")
        limits = [1.5 * relative(a, b) + torch.finfo(hidden.dtype).eps for a, b in zip(naive, exact, strict=True)]
        judge(f"{name}: loss, dh, dW", [relative(a, b) for a, b in zip(fused, exact, strict=True)], limits)
        if name == "MLE" and find_spec("liger_kernel") is not None and size.device == "cuda":
            for title, sums in ((LIGER, None), (LIGER_FLOAT32, torch.float32)):
                loss = liger(sums)(given)
                peer = [loss.detach(), *torch.autograd.grad(loss, (given.hidden, given.weight))]
                errors = ", ".join(f"{relative(a, b):.1e}" for a, b in zip(peer, exact, strict=True))
                say(f"  {title}: loss, dh, dW: relative errors {errors}")


def _scored(hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, impl: str) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    loss = linear_token_loss(
        leaves[0], leaves[1], labels, objective=objective, cost=EmbeddingCost(weight), impl=impl
    ).loss
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def relative(got: Tensor, exact: Tensor) -> float:
    """Norm of the error over the norm of the exact result."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def judge(what: str, errors: Sequence[float], limits: Sequence[float]) -> None:
    """Print the errors; raise ArithmeticError if one exceeds its limit."""
    pairs = list(zip(errors, limits, strict=True))
    say(f"  {what}: relative errors {', '.join(f'{error:.1e} <= {limit:.1e}' for error, limit in pairs)}")
    if not all(error <= limit for error, limit in pairs):
        raise ArithmeticError(f"{what}: an error exceeds its limit, so nothing is timed; fix the kernel first.")


# ---- measuring -------------------------------------------------------------------------------------------------------


def seconds_of(run: Callable[[], Any], device: str) -> float:
    """Return the time of a call: on a GPU between two events, so that the work of the host does not count."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def extra_bytes(loss: Loss, problem: Problem, device: str) -> int | None:
    """Peak of one pass beyond memory in use before and the gradients that stay; None on a CPU."""
    problem.hidden.grad = problem.weight.grad = None
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pass_of(loss, problem)()
    torch.cuda.synchronize()
    kept = sum(leaf.grad.nbytes for leaf in (problem.hidden, problem.weight) if leaf.grad is not None)
    return torch.cuda.max_memory_allocated() - before - kept


def forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Measured:
    timing: Timing
    extra: int | None


def measure_all(size: Size, problem: Problem, *, rounds: int) -> dict[str, Measured]:
    """All contestants that run, in interleaved rounds; prints why another one does not."""
    runners: dict[str, Callable[[], None]] = {}
    extra: dict[str, int | None] = {}
    for name, make in contestants(size).items():
        try:
            loss = make()
            for _ in range(2):  # kernels are compiled, and the cost makes its 16-bit copy
                pass_of(loss, problem)()
            extra[name] = extra_bytes(loss, problem, size.device)
            runners[name] = pass_of(loss, problem)
        except Exception as error:
            if name in (EMO_USED, MLE_USED):
                raise
            say(f"  {name} does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        forget(size.device)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, run in runners.items():
            seconds[name].append(seconds_of(run, size.device))
    problem.hidden.grad = problem.weight.grad = None
    return {name: Measured(Timing(tuple(values)), extra[name]) for name, values in seconds.items()}


def report(size: Size, case: str, measured: dict[str, Measured], *, rounds: int, output: Path | None) -> None:
    """Print all measurements and verdicts, and append to results.csv."""
    timings = {name: one.timing for name, one in measured.items()}
    report_times(NAME, case, timings, peer=EMO_USED, rounds=rounds, output=output)
    extra = {name: one.extra for name, one in measured.items() if one.extra is not None}
    if extra:
        report_memory(NAME, case, extra, peer=EMO_USED, output=output)
    table([["quantity", "limit", "measured"], *verdicts(size, measured)])


def verdicts(size: Size, measured: dict[str, Measured]) -> list[list[str]]:
    """EMO against our MLE, dense cross-entropy and Liger, in time and memory."""

    def times(name: str, peer: str, limit: float) -> list[str]:
        both = name in measured and peer in measured
        results = ratios(measured[name].timing, measured[peer].timing) if both else []
        return Limit(f"time of {name} / {peer}", limit).verdict(*results)

    def memory(peer: str) -> list[str]:
        emo, other = (measured.get(name) for name in (EMO_USED, peer))
        known = emo and other and emo.extra is not None and other.extra
        return Limit(f"memory of EMO / {peer}", 1.0).verdict(*([emo.extra / other.extra] if known else []))

    return [
        times(EMO_USED, MLE_USED, 1.12), *(times(emo_at(chunk), mle_at(chunk), 1.12) for chunk in size.chunks),
        times(EMO_USED, DENSE, 1.2), *(times(EMO_USED, peer, 0.6) for peer in (LIGER, LIGER_FLOAT32)),
        *(memory(peer) for peer in (DENSE, LIGER, LIGER_FLOAT32)),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", nargs="?", choices=("tokens", "transport"), default="tokens",
                        help="token losses, or entropic transport (%(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="folder for results.csv (default: benchmarks; with --dry-run none)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected 1 or more")
    if rows_triton.triton is None or not (options.dry_run or torch.cuda.is_available()):
        missing = "Triton" if rows_triton.triton is None else "a CUDA device"
        print(f"python -m benchmarks.gpu needs {missing}; --dry-run runs it on a CPU with Triton.", file=sys.stderr)
        return 2
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        say("Dry run: the times below mean nothing.")
    if options.what == "transport":
        gpu_transport.run(
            dry=options.dry_run, rounds=options.rounds, output=options.output or (None if options.dry_run else FOLDER)
        )
        return 0
    size = DRY if options.dry_run else Size()
    say("Checks")
    check_losses(size)
    forget(size.device)
    settings = Settings(output=options.output or (None if options.dry_run else FOLDER))
    settings = settings if options.dry_run else with_inputs(settings, NAME)
    source = labels_for(settings, size.vocab)
    labels = source.draw(size.tokens, 1)
    problem = size.problem(labels)
    case = f"{size.name} u={share_distinct(labels):.2f} {source.name}"
    for head in ("trained", "frozen"):
        problem.weight.requires_grad_(head == "trained")
        measured = measure_all(size, problem, rounds=options.rounds)
        report(size, f"{case}, {head} head", measured, rounds=options.rounds, output=settings.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
