"""Time, memory and gradient error of token losses: forward and backward pass from hidden states and head.

Contestants: dense cross-entropy, `F.linear_cross_entropy` with the best chunk of a sweep and with its automatic choice,
EMOLoss, and ours with its default chunk. Every round has new labels, the same for all; `u` is the mean share of
distinct labels, which determines the time of EMO's cost rows. EMO's cost object is made once, as in training.
`F.linear_cross_entropy` without options is dense cross-entropy, so it is not listed.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass

from benchmarks.bench import Bench, one_thread
from benchmarks.contestants import (
    DENSE,
    EMO_ENTROPY,
    EMO_OURS,
    HAS_TORCH,
    MLE_OURS,
    OTHER_OBJECTIVES,
    PUBLISHED,
    TORCH,
    TORCH_AUTO,
    Problem,
    our_chunk,
    steps,
    torch_name,
    with_published,
)
from benchmarks.gradient_error import contestants as with_gradients
from benchmarks.gradient_error import gradient_errors, make_problem
from benchmarks.labels import labels_for, share_distinct
from benchmarks.measure import (
    MIB,
    SMALL_SIZES,
    Limit,
    Settings,
    Timing,
    heading,
    keep,
    matmul_precision,
    ratios,
    report_memory,
    report_slowdowns,
    say,
    slowdowns,
    table,
)
from benchmarks.memory import extra_bytes

NAME = "token_loss"
ROUNDS, SMALL_ROUNDS, SWEEP_ROUNDS = 7, 2, 3
CHUNKS = (128, 256, 512, 1024, 2048)
BF16 = "bf16 products (opt-in: matmul precision medium)"


@dataclass(frozen=True)
class Size:
    tokens: int
    vocab: int
    width: int

    def __str__(self) -> str:
        return f"N={self.tokens} V={self.vocab} d={self.width}"


SIZES = (Size(2048, 32000, 768), Size(4096, 50257, 768))
# Several chunks each. The limit is for the first; a narrow head is harder, because fewer terms average errors out.
ERROR_SIZES = (Size(2048, 32000, 768), Size(2048, 32000, 64))
SMALL, SMALL_ERROR = (Size(256, 600, 32),), (Size(64, 600, 32),)
SHARPNESS = (1.0, 3.0, 10.0)  # standard deviation of the logits

EMO_TORCH = Limit(f"EMO time / best {TORCH} time", 1.10)
EMO_DENSE_CE = Limit("EMO time / dense cross-entropy time", 0.95)
EMO_PUBLISHED = Limit("EMO time / EMOLoss 0.0.3 time", 0.33)
EMO_BUSY = Limit("EMO slowdown beside busy processes / dense cross-entropy's", 1.10)
MLE_TORCH = Limit(f"MLE time / best {TORCH} time", 1.00)
EMO_WITH_ENTROPY = Limit("EMO with entropy time / EMO time", 1.05)
MEMORY = Limit("EMO peak extra memory beside its cost object / dense cross-entropy's", 0.35)
EMO_ERROR = Limit("EMO gradient error / dense cross-entropy's", 2.00)
MLE_ERROR = Limit("MLE gradient error / dense cross-entropy's", 2.00)


class Case:
    """One size: its labels and its problem."""

    def __init__(self, size: Size, settings: Settings) -> None:
        self.size, self.settings = size, settings
        self.labels = labels_for(settings, size.vocab)
        self.bench = Bench(settings, NAME, rounds=ROUNDS, small_rounds=SMALL_ROUNDS)
        self.problem = Problem.random(size.vocab, size.width, self.labels.draw(size.tokens, 0))

    def name(self, share: float, note: str = "") -> str:
        chunk = our_chunk(self.size.tokens, self.size.vocab)
        parts = [f"{self.size} float32 u={share:.2f}", self.labels.name, f"our chunk {chunk}", note]
        return ", ".join(part for part in parts if part)

    def timed(
        self, names: list[str], *, most: int | None = None, note: str = "", processor: bool = False
    ) -> dict[str, Timing]:
        """Interleaved rounds with new labels each; the case names their mean share of distinct ones."""
        rounds = min(self.bench.rounds, most or self.bench.rounds)
        labels = [self.labels.draw(self.size.tokens, i) for i in range(rounds + 1)]

        def new_labels(i: int) -> None:
            self.problem.labels = labels[i]

        case = self.name(statistics.fmean(map(share_distinct, labels[1:])), note)
        return self.bench.timed(
            case, steps(names, self.problem), most=most, turn=0.0, processor=processor, before_round=new_labels
        )

    def torch_contestants(self) -> list[str]:
        """The best chunk of a sweep, and the automatic choice."""
        if not HAS_TORCH:
            return []
        names = [TORCH_AUTO, *map(torch_name, sorted({min(chunk, self.size.tokens) for chunk in CHUNKS}))]
        swept = self.timed(names, most=SWEEP_ROUNDS, note=f"sweep of {TORCH}")
        return [min(names[1:], key=lambda name: swept[name].median), TORCH_AUTO]


def time_case(case: Case, in_torch: list[str]) -> list[list[str]]:
    """The main comparison."""
    timings = case.timed(with_published([DENSE, *in_torch, MLE_OURS, EMO_OURS]))
    emo, mle = timings[EMO_OURS], timings[MLE_OURS]
    torch_peers = [timings[name] for name in in_torch]
    return [
        EMO_TORCH.verdict(*(ratios(emo, *torch_peers) if torch_peers else [])),
        EMO_DENSE_CE.verdict(*ratios(emo, timings[DENSE])),
        EMO_PUBLISHED.verdict(*(ratios(emo, timings[PUBLISHED]) if PUBLISHED in timings else [])),
        MLE_TORCH.verdict(*(ratios(mle, *torch_peers) if torch_peers else [])),
    ]


def objectives_case(case: Case) -> list[list[str]]:
    """Objectives that read more statistics, beside EMO, MLE and dense cross-entropy, on one thread."""
    names, note = [EMO_OURS, DENSE, MLE_OURS, *OTHER_OBJECTIVES], "objectives, processor time"
    with one_thread():  # others wait by spinning, which counts
        timings = case.timed(names, note=note, processor=True)
    return [EMO_WITH_ENTROPY.verdict(*ratios(timings[EMO_ENTROPY], timings[EMO_OURS]))]


def busy_case(case: Case, in_torch: list[str]) -> list[list[str]]:
    """How much slower each is beside one busy process per core."""
    names = [DENSE, *in_torch, MLE_OURS, EMO_OURS]
    results = slowdowns(steps(names, case.problem), rounds=case.bench.rounds)
    name = case.name(share_distinct(case.problem.labels))
    slower = report_slowdowns(NAME, name, results, output=case.settings.output)
    return [EMO_BUSY.verdict(*ratios(slower[EMO_OURS], slower[DENSE]))]


def memory_case(case: Case, in_torch: list[str]) -> list[list[str]]:
    """Peak memory of each contestant in its own process."""
    size, settings = case.size, case.settings
    labels = case.labels.draw(size.tokens, 1)
    names = with_published([DENSE, *in_torch, MLE_OURS, EMO_OURS])
    extra = extra_bytes(names, labels, size.vocab, size.width, processes="one" if settings.small else "each")
    report_memory(NAME, case.name(share_distinct(labels)), extra, peer=DENSE, output=settings.output)
    cost_object = 4 * size.vocab * size.width
    say(f"  EMO's cost object, a frozen copy of the head, is kept between passes: {cost_object / MIB:.0f} MiB; with it "
        f"{(extra[EMO_OURS] + cost_object) / extra[DENSE]:.3f} x {DENSE}")  # fmt: skip
    return [MEMORY.verdict(extra[EMO_OURS] / extra[DENSE])]


def error_case(settings: Settings, size: Size, *, precision: str = "highest") -> list[list[str]]:
    """Gradient errors at each sharpness; the limits apply to the largest."""
    labels = labels_for(settings, size.vocab).draw(size.tokens, 0)
    note = "" if precision == "highest" else f", {BF16}"
    worst = {EMO_OURS: 0.0, MLE_OURS: 0.0}
    for sharpness in SHARPNESS[:1] if settings.small else SHARPNESS:
        case = f"{size} float32, logits of standard deviation {sharpness:g}, half the labels argmax{note}"
        problem = make_problem(size.vocab, size.width, labels, sharpness=sharpness)
        errors = gradient_errors(problem, with_gradients(), precision=precision)
        heading(f"{NAME} gradient error", case, "relative Frobenius error against float64")
        rows = []
        for name, error in errors.items():
            ratio = error.over(errors[DENSE])
            say(f"  {name:<34} dh {error.hidden:.2e}   dW {error.weight:.2e}   {ratio:8.2f} x {DENSE} (larger of both)")
            rows.append({"name": name, "error": f"{max(error.hidden, error.weight):.3e}", "ratio": f"{ratio:.3f}",
                         "peer": DENSE})  # fmt: skip
            worst[name] = max(worst.get(name, 0.0), ratio)
        keep(settings.output, f"{NAME} gradient error", case, rows)
    return [EMO_ERROR.verdict(worst[EMO_OURS]), MLE_ERROR.verdict(worst[MLE_OURS])]


def main(settings: Settings) -> None:
    sizes, error_sizes = (SMALL, SMALL_ERROR) if settings.small else (SIZES, ERROR_SIZES)
    verdicts: list[list[str]] = []
    for size in sizes:
        case = Case(size, settings)
        in_torch = case.torch_contestants()
        results = time_case(case, in_torch)
        with matmul_precision("medium"):
            case.timed([DENSE, *in_torch, MLE_OURS, EMO_OURS], most=SWEEP_ROUNDS, note=BF16)
        if size is sizes[0]:
            results += objectives_case(case)
            results += busy_case(case, in_torch)
        gc.collect()
        results += memory_case(case, in_torch)
        verdicts += [[str(size), *row] for row in results]
    for size in error_sizes:
        verdicts += [[str(size), *row] for row in error_case(settings, size)]
    error_case(settings, error_sizes[0], precision="medium")
    if settings.small:
        say(SMALL_SIZES)
        return
    say("\nMedians of the ratios in each round (and their quartiles), in float32 with products at full precision:")
    table([["size", "quantity", "limit", "measured"], *verdicts])
