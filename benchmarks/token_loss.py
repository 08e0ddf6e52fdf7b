"""What a token loss costs: time, memory and gradient error of forward and backward, from hidden states and head.

Dense cross-entropy, `F.linear_cross_entropy` with its best chunk of a sweep and with its automatic choice, EMOLoss,
and ours with its default chunk. Every round has new labels, the same for all contestants of the round; `u` is the mean
share of distinct labels, on which the price of EMO's cost rows depends. EMO's cost object is made once, as in training.
`F.linear_cross_entropy` without options is not among them: it is dense cross-entropy.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass

from benchmarks.contestants import (
    DENSE,
    EMO_OURS,
    HAS_TORCH,
    MLE_OURS,
    OTHER_OBJECTIVES,
    PUBLISHED,
    TORCH,
    TORCH_AUTO,
    Problem,
    has_published,
    our_chunk,
    steps,
    torch_name,
)
from benchmarks.gradient_error import contestants as judged
from benchmarks.gradient_error import gradient_errors, make_problem
from benchmarks.labels import labels_for, share_distinct
from benchmarks.measure import (
    Settings,
    Timing,
    heading,
    keep,
    matmul_precision,
    ratios,
    report_slowdowns,
    report_times,
    say,
    slowdowns,
    table,
    timed_rounds,
)
from benchmarks.memory import MIB, counted_bytes, extra_bytes

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
# Several chunks each; the limit is for the first, and a narrow head is harder: fewer terms average errors out.
ERROR_SIZES = (Size(2048, 32000, 768), Size(2048, 32000, 64))
SMALL = (Size(256, 600, 32),)
SMALL_ERROR = Size(64, 600, 32)
SHARPNESS = (1.0, 3.0, 10.0)  # standard deviation of the logits


@dataclass(frozen=True)
class Limit:
    """A row of the table: `measured / peer` is to stay at or under `limit`."""

    what: str
    limit: float

    def judged(self, *measured: float) -> list[str]:
        """The median of what was measured; its quartiles too where there are several, for a limit may lie between."""
        if not measured:
            return [self.what, f"<= {self.limit:.2f}", "not measured"]
        ratio = statistics.median(measured)
        verdict = f"{ratio:.3f} {'met' if ratio <= self.limit else 'missed'}"
        if len(measured) > 1:
            low, _, high = statistics.quantiles(measured, n=4, method="inclusive")
            noise = ", within noise" if low <= self.limit < high else ""
            verdict += f" ({low:.3f} to {high:.3f}{noise})"
        return [self.what, f"<= {self.limit:.2f}", verdict]


EMO_TORCH = Limit(f"EMO time / best {TORCH} time", 1.10)
EMO_DENSE_CE = Limit("EMO time / dense cross-entropy time", 0.95)
EMO_PUBLISHED = Limit("EMO time / EMOLoss 0.0.3 time", 0.33)
EMO_BUSY = Limit("EMO slowdown beside busy processes / dense cross-entropy's", 1.10)
MLE_TORCH = Limit(f"MLE time / best {TORCH} time", 1.00)
MEMORY = Limit("EMO peak extra memory beside its cost object / dense cross-entropy's", 0.35)
EMO_ERROR = Limit("EMO gradient error / dense cross-entropy's", 2.00)
MLE_ERROR = Limit("MLE gradient error / dense cross-entropy's", 2.00)


class Case:
    """One size: its labels, its problem, and the words that name it."""

    def __init__(self, size: Size, settings: Settings) -> None:
        self.size, self.settings = size, settings
        self.labels = labels_for(settings, size.vocab)
        self.rounds = settings.rounds or (SMALL_ROUNDS if settings.small else ROUNDS)
        self.problem = Problem.random(size.tokens, size.vocab, size.width, self.labels.draw(size.tokens, 0))

    def name(self, share: float, note: str = "") -> str:
        parts = [
            f"{self.size} float32 u={share:.2f}",
            self.labels.name,
            f"our chunk {our_chunk(self.size.tokens, self.size.vocab)}",
            note,
        ]
        return ", ".join(part for part in parts if part)

    def times(self, names: list[str], *, rounds: int) -> tuple[dict[str, Timing], float]:
        """Interleaved rounds, each with labels of its own; and the mean share of distinct ones."""
        shares = []

        def new_labels(i: int) -> None:
            self.problem.labels = self.labels.draw(self.size.tokens, i)
            if i:
                shares.append(share_distinct(self.problem.labels))

        timings = timed_rounds(steps(names, self.problem), rounds=rounds, before_round=new_labels)
        return timings, sum(shares) / len(shares)

    def report(self, names: list[str], *, rounds: int, note: str = "") -> dict[str, Timing]:
        timings, share = self.times(names, rounds=rounds)
        report_times(NAME, self.name(share, note), timings, peer=names[0], rounds=rounds, output=self.settings.output)
        return timings

    def torch_contestants(self) -> list[str]:
        """The best chunk of a sweep, and the automatic choice."""
        if not HAS_TORCH:
            return []
        chunks = sorted({min(chunk, self.size.tokens) for chunk in CHUNKS})
        names = [TORCH_AUTO, *map(torch_name, chunks)]
        swept = self.report(names, rounds=min(SWEEP_ROUNDS, self.rounds), note=f"sweep of {TORCH}")
        return [min(names[1:], key=lambda name: swept[name].median), TORCH_AUTO]


def time_case(case: Case, in_torch: list[str], *, objectives: bool) -> list[list[str]]:
    """The main comparison, and the verdicts on it; `objectives`: TaiLr and MixCE beside MLE and EMO."""
    published = [PUBLISHED] if has_published() else []
    others = list(OTHER_OBJECTIVES) if objectives else []
    timings = case.report([DENSE, *in_torch, MLE_OURS, EMO_OURS, *others, *published], rounds=case.rounds)
    emo, mle = timings[EMO_OURS], timings[MLE_OURS]
    torch_peers = [timings[name] for name in in_torch]
    return [
        EMO_TORCH.judged(*(ratios(emo, *torch_peers) if torch_peers else [])),
        EMO_DENSE_CE.judged(*ratios(emo, timings[DENSE])),
        EMO_PUBLISHED.judged(*(ratios(emo, timings[PUBLISHED]) if published else [])),
        MLE_TORCH.judged(*(ratios(mle, *torch_peers) if torch_peers else [])),
    ]


def busy_case(case: Case, in_torch: list[str]) -> list[list[str]]:
    """How much longer each takes where every core has another process to run."""
    names, rounds = [DENSE, *in_torch, MLE_OURS, EMO_OURS], min(SWEEP_ROUNDS, case.rounds)
    found = slowdowns(steps(names, case.problem), rounds=rounds)
    name = case.name(share_distinct(case.problem.labels))
    slower = report_slowdowns(NAME, name, found, rounds=rounds, output=case.settings.output)
    return [EMO_BUSY.judged(slower[EMO_OURS] / slower[DENSE])]


def memory_case(case: Case, in_torch: list[str]) -> list[list[str]]:
    """Peaks in processes of their own, beside what a count of the largest tensors gives."""
    size, settings = case.size, case.settings
    names = [DENSE, *in_torch, MLE_OURS, EMO_OURS, *([PUBLISHED] if has_published() else [])]
    labels = case.labels.draw(size.tokens, 1)
    share = share_distinct(labels)
    extra = extra_bytes(names, labels, size.vocab, size.width, processes="one" if settings.small else "each")
    text = case.name(share)
    heading(f"{NAME} memory", text, "peak beyond inputs and gradients, MALLOC_MMAP_THRESHOLD_=131072")
    rows = []
    for name, measured in extra.items():
        counted = counted_bytes(name, size.tokens, size.vocab, size.width, share)
        ratio = measured / extra[DENSE]
        beside = "" if counted is None else f"   ({counted / MIB:.0f} MiB counted)"
        say(f"  {name:<30} {measured / MIB:9.1f} MiB   {ratio:6.3f} x {DENSE}{beside}")
        rows.append({"name": name, "mebibytes": f"{measured / MIB:.1f}", "ratio": f"{ratio:.4f}", "peer": DENSE})
    keep(settings.output, f"{NAME} memory", text, rows)
    cost_object = 4 * size.vocab * size.width
    say(f"  EMO's cost object, a frozen copy of the head, stays between passes: {cost_object / MIB:.0f} MiB; with it "
        f"{(extra[EMO_OURS] + cost_object) / extra[DENSE]:.3f} x {DENSE}")  # fmt: skip
    return [MEMORY.judged(extra[EMO_OURS] / extra[DENSE])]


def error_case(settings: Settings, size: Size, *, precision: str = "highest") -> list[list[str]]:
    """Gradient errors at each sharpness; the verdicts are on the worst."""
    labels = labels_for(settings, size.vocab)
    note = "" if precision == "highest" else f", {BF16}"
    worst = {EMO_OURS: 0.0, MLE_OURS: 0.0}
    for sharpness in SHARPNESS[:1] if settings.small else SHARPNESS:
        case = f"{size} float32, logits of standard deviation {sharpness:g}, half the labels argmax{note}"
        problem = make_problem(size.tokens, size.vocab, size.width, labels, sharpness=sharpness)
        errors = gradient_errors(problem, judged(), precision=precision)
        heading(f"{NAME} gradient error", case, "relative Frobenius error against float64")
        rows = []
        for name, error in errors.items():
            ratio = error.over(errors[DENSE])
            say(f"  {name:<30} dh {error.hidden:.2e}   dW {error.weight:.2e}   {ratio:8.2f} x {DENSE} (the worse)")
            rows.append({"name": name, "error": f"{max(error.hidden, error.weight):.3e}", "ratio": f"{ratio:.3f}",
                         "peer": DENSE})  # fmt: skip
            worst[name] = max(worst.get(name, 0.0), ratio)
        keep(settings.output, f"{NAME} gradient error", case, rows)
    return [EMO_ERROR.judged(worst[EMO_OURS]), MLE_ERROR.judged(worst[MLE_OURS])]


def main(settings: Settings) -> None:
    sizes = SMALL if settings.small else SIZES
    verdicts: list[list[str]] = []
    for size in sizes:
        case = Case(size, settings)
        in_torch = case.torch_contestants()
        found = time_case(case, in_torch, objectives=size is sizes[0])
        with matmul_precision("medium"):
            case.report([DENSE, *in_torch, MLE_OURS, EMO_OURS], rounds=min(SWEEP_ROUNDS, case.rounds), note=BF16)
        if size is sizes[0]:
            found += busy_case(case, in_torch)
        gc.collect()
        found += memory_case(case, in_torch)
        verdicts += [[str(size), *row] for row in found]
    for size in (SMALL_ERROR,) if settings.small else ERROR_SIZES:
        verdicts += [[str(size), *row] for row in error_case(settings, size)]
    error_case(settings, SMALL_ERROR if settings.small else ERROR_SIZES[0], precision="medium")
    if settings.small:
        say("\nThese sizes are there to see that everything runs; they say nothing about the limits.")
        return
    say("\nMedians of the ratios in each round (and their quartiles), in float32 with products at full precision:")
    table([["size", "quantity", "limit", "measured"], *verdicts])
