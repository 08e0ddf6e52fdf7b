"""`python -m benchmarks.gpu`: token losses on one large GPU, and whether they keep their goals there.

In bfloat16, N = 8192 tokens, V = 128256, d = 4096, forward and backward pass from hidden states and head:

    EMO over our MLE, same chunk               at most 1.12
    EMO over Liger's fused cross-entropy       at most 0.6, in at most its memory

with a trained head and with a frozen one (LoRA). Seconds are those between CUDA events, medians over rounds in which
every contestant runs once, after a warm-up. Memory is the peak of one pass beyond inputs and gradients; the cost object
of EMO is an input. Before that `gpu_checks` compares the compiled Triton sweeps with float64, and loss and gradients
with dense float32. `--dry-run` goes the same way with tiny sizes on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from benchmarks.gpu_checks import check_losses, check_sweeps
from benchmarks.labels import find_data, labels_for, share_distinct
from benchmarks.measure import FOLDER, Settings, Timing, append, hardware, say, table
from otloss_llm import EMO, MLE, EmbeddingCost, linear_token_loss
from otloss_llm.kernels import rows_triton
from otloss_llm.objectives import Objective

FIELDS = (
    "date",
    "case",
    "head",
    "name",
    "milliseconds",
    "spread",
    "mebibytes",
    "rounds",
    "hardware",
    "torch",
    "triton",
)
MIB = 2**20
LIGER, DENSE, TORCH, PUBLISHED = "Liger", "dense cross-entropy", "F.linear_cross_entropy", "EMOLoss 0.0.3"
CHUNKS = (1024, 2048, 4096)
USED = "EMO as called without impl and chunk_size"
DEFAULT_CHUNK = 2048  # what chunk_size=None takes at the size measured


@dataclass(frozen=True)
class Size:
    """A problem's size, and the smaller slice of it that gradients are checked on."""

    tokens: int = 8192
    vocab: int = 128256
    width: int = 4096
    checked: tuple[int, int] = (512, 32000)  # tokens, vocabulary
    chunks: tuple[int, ...] = CHUNKS
    device: str = "cuda"

    @property
    def name(self) -> str:
        return f"N={self.tokens} V={self.vocab} d={self.width} bfloat16"


DRY = Size(tokens=9, vocab=130, width=16, checked=(12, 70), chunks=(4, 8), device="cpu")


@dataclass
class Problem:
    """Inputs that all contestants share."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    cost: EmbeddingCost

    @classmethod
    def random(cls, size: Size, labels: Tensor) -> Problem:
        """Logits are normal with standard deviation 1; the head is trained."""
        generator = torch.Generator(size.device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=size.device).bfloat16()

        hidden = normal(size.tokens, size.width).requires_grad_()
        weight = (normal(size.vocab, size.width) * size.width**-0.5).requires_grad_()
        return cls(hidden, weight, labels.to(size.device), EmbeddingCost(weight))


Loss = Callable[[Problem], Tensor]


# ---- contestants -----------------------------------------------------------------------------------------------------


def ours(objective: Objective, chunk: int | None = None, impl: str = "triton") -> Loss:
    def loss(problem: Problem) -> Tensor:
        cost = problem.cost if isinstance(objective, EMO) else None
        return linear_token_loss(
            problem.hidden, problem.weight, problem.labels, objective=objective, cost=cost, impl=impl, chunk_size=chunk
        ).loss

    return loss


def liger() -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return lambda problem: fused(problem.weight, problem.hidden, problem.labels)


def dense() -> Loss:
    return lambda problem: F.cross_entropy(F.linear(problem.hidden, problem.weight), problem.labels)


def torch_fused(chunk: int | None) -> Loss:
    """In chunks of that many tokens, or of its own choice; without options it would be dense cross-entropy."""
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions(**({} if chunk is None else {"batch_chunk_size": chunk}))
    return lambda problem: F.linear_cross_entropy(problem.hidden, problem.weight, problem.labels, options=options)


def published() -> Loss:
    from emo import EMOLoss

    def loss(problem: Problem) -> Tensor:  # it shifts labels itself, so one more position stands at the end
        hidden = torch.cat([problem.hidden, problem.hidden[-1:]])
        shifted = torch.cat([problem.labels[:1], problem.labels])
        return EMOLoss(F.linear(hidden, problem.weight)[None], shifted[None], problem.weight.detach())

    return loss


def emo_at(chunk: int) -> str:
    return f"EMO chunk={chunk}"


def mle_at(chunk: int) -> str:
    return f"MLE chunk={chunk}"


def contestants(size: Size) -> dict[str, Callable[[], Loss]]:
    """What makes each loss; making it may fail for want of a package."""
    makers: dict[str, Callable[[], Loss]] = {}
    for chunk in size.chunks:
        makers[emo_at(chunk)] = lambda chunk=chunk: ours(EMO(), chunk)
        makers[mle_at(chunk)] = lambda chunk=chunk: ours(MLE(), chunk)
        makers[f"{TORCH} chunk={chunk}"] = lambda chunk=chunk: torch_fused(chunk)
    makers[USED] = lambda: ours(EMO(), None, "auto" if size.device == "cuda" else "triton")
    makers[f"{TORCH} automatic"] = lambda: torch_fused(None)
    return makers | {LIGER: liger, DENSE: dense, PUBLISHED: published}


# ---- measuring -------------------------------------------------------------------------------------------------------


def step(loss: Loss, problem: Problem) -> None:
    problem.hidden.grad = problem.weight.grad = None
    loss(problem).backward()


def seconds_of(run: Callable[[], Any], device: str) -> float:
    """On a GPU between two events; nothing else is waited for, so that what the host does in time costs nothing."""
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
    """Peak of one pass beyond what was there before and the gradients that stay; None on a CPU."""
    problem.hidden.grad = problem.weight.grad = None
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(loss, problem)
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


def race(size: Size, problem: Problem, *, rounds: int) -> dict[str, Measured]:
    """All that run at all, in interleaved rounds; why another does not is said."""
    runners: dict[str, Loss] = {}
    extra: dict[str, int | None] = {}
    for name, make in contestants(size).items():
        try:
            loss = make()
            for _ in range(2):  # kernels are compiled, and the cost makes its 16-bit copy
                step(loss, problem)
            extra[name] = extra_bytes(loss, problem, size.device)
            runners[name] = loss
        except Exception as error:
            if name in (emo_at(DEFAULT_CHUNK), mle_at(DEFAULT_CHUNK)):
                raise
            say(f"  {name} is left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        forget(size.device)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, loss in runners.items():
            seconds[name].append(seconds_of(lambda loss=loss: step(loss, problem), size.device))  # type: ignore[misc]
    problem.hidden.grad = problem.weight.grad = None
    return {name: Measured(Timing(tuple(values)), extra[name]) for name, values in seconds.items()}


def check_slice(size: Size) -> None:
    """Loss and gradients of a problem small enough for dense float32, with labels that repeat."""
    tokens, vocab = size.checked
    labels = torch.randint(vocab // 4, (tokens,), generator=torch.Generator().manual_seed(2))
    given = Problem.random(replace(size, tokens=tokens, vocab=vocab), labels)
    check_losses(given.hidden.detach(), given.weight.detach(), given.labels)


# ---- report ----------------------------------------------------------------------------------------------------------


def named_hardware(device: str) -> str:
    return hardware() if device == "cpu" else torch.cuda.get_device_name()


def report(
    size: Size, head: str, measured: dict[str, Measured], *, case: str, rounds: int, output: Path | None
) -> None:
    """A table of all, the ratios the goals are about, and rows of gpu.csv."""
    say(f"\n{case}, {head} head; {named_hardware(size.device)}, torch {torch.__version__}, {rounds} rounds")
    lines, kept = [("name", "ms", "spread", "MiB beyond inputs and gradients")], []
    for name, one in measured.items():
        milliseconds, spread = f"{one.timing.median * 1000:.2f}", f"{one.timing.spread:.3f}"
        mebibytes = "" if one.extra is None else f"{one.extra / MIB:.0f}"
        lines.append((name, milliseconds, spread, mebibytes))
        kept.append({
            "date": date.today().isoformat(), "case": case, "head": head, "name": name, "milliseconds": milliseconds,
            "spread": spread, "mebibytes": mebibytes, "rounds": rounds, "hardware": named_hardware(size.device),
            "torch": torch.__version__, "triton": getattr(rows_triton.triton, "__version__", ""),
        })  # fmt: skip
    table(lines)
    for chunk in size.chunks:
        say_ratio(measured, emo_at(chunk), mle_at(chunk), goal=1.12)
    ours_first = DEFAULT_CHUNK if DEFAULT_CHUNK in size.chunks else size.chunks[-1]
    say_ratio(measured, emo_at(ours_first), LIGER, goal=0.6)
    emo, peer = measured.get(emo_at(ours_first)), measured.get(LIGER)
    if emo is not None and peer is not None and emo.extra is not None and peer.extra is not None:
        verdict = "met" if emo.extra <= peer.extra else "missed"
        say(f"  memory of {emo_at(ours_first)}: {emo.extra / peer.extra:.2f} x {LIGER}   (goal <= 1: {verdict})")
    if output is not None:
        append(output / "gpu.csv", FIELDS, kept)


def say_ratio(measured: dict[str, Measured], name: str, peer: str, *, goal: float) -> None:
    if name in measured and peer in measured:
        ratio = measured[name].timing.median / measured[peer].timing.median
        say(f"  {name}: {ratio:.3f} x {peer}   (goal <= {goal}: {'met' if ratio <= goal else 'missed'})")
    else:
        say(f"  {name} over {peer}: not measured")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repetitions (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--output", type=Path, help="folder for gpu.csv (default: benchmarks; with --dry-run none)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected 1 or more")
    if rows_triton.triton is None or not (options.dry_run or torch.cuda.is_available()):
        missing = "Triton" if rows_triton.triton is None else "a CUDA device"
        print(
            f"python -m benchmarks.gpu needs {missing}; --dry-run exercises it on a CPU with Triton.", file=sys.stderr
        )
        return 2
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        say("Dry run: the times below mean nothing.")
    size = DRY if options.dry_run else Size()
    say("Checks")
    check_sweeps(size.vocab, size.device)
    check_slice(size)
    forget(size.device)
    data = None if options.dry_run else find_data(None, Settings.text)
    source = labels_for(Settings(data=data), size.vocab)
    labels = source.draw(size.tokens, 1)
    problem = Problem.random(size, labels)
    case = f"{size.name} u={share_distinct(labels):.2f} {source.name}"
    output = options.output or (None if options.dry_run else FOLDER)
    for head in ("trained", "frozen"):
        problem.weight.requires_grad_(head == "trained")
        measured = race(size, problem, rounds=options.rounds)
        report(size, head, measured, case=case, rounds=options.rounds, output=output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
