"""The equations of a step of Newton's method on the cells of a plan: a factor, and conjugate gradients.

`newton_numba` has the notation. The equations are H x = t - c with

    H = diag(c + s_q t) - k_p S^T diag(r) S

    factor      H is the Laplacian of a graph, plus a diagonal: row i joins any two of its columns by an edge of weight
                k_p r_i S_ij S_il. The exact elimination of a column joins any two of its neighbours in the same way.
                `add_tree` puts a random tree in the place of these edges, with the same mean: each neighbour, from the
                lightest to the heaviest, is joined to one of the heavier ones, with a probability in proportion to
                their weights. Multiples of the golden ratio serve as random numbers.
    solution    Conjugate gradients on H, with the factor as the preconditioner.

Source: R. Kyng, S. Sachdeva, Approximate Gaussian Elimination for Laplacians, 2016.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otloss._numba.compile import bits_of_float64, compiled, inner
from otloss._numba.tasks import is_stopped
from otloss.solvers.entropic.newton_kernels.cells_numba import (
    CHECKED,
    check_masses,
    check_shares,
    filled_integers,
    resize,
    target,
)
from otloss.solvers.entropic.newton_kernels.numbers import NEWTON

# ---- the approximate factor ------------------------------------------------------------------------------------------


class Edges(NamedTuple):
    """Edges between columns, as linked lists. The list of column j begins at heads[j].

    An edge is in the list of the column that is eliminated first; `columns` names the other one. The last list holds
    the free places.
    """

    heads: Any
    nexts: Any
    columns: Any
    weights: Any


class Thinning(NamedTuple):
    """Scratch of `add_tree`: places of shares, the shares, sums of the shares after each, and where octaves begin.

    Of each octave at most `shares_of_octave` enter the factor.
    """

    places: Any
    kept: Any
    heavier: Any
    bounds: Any
    shares_of_octave: int


class Factor(NamedTuple):
    """L D L^T near H. Column order[k] is eliminated as the k-th, with the k-th pivot.

    Its neighbours then are columns[starts[k] : starts[k + 1]]; shares are the weights of these edges over the pivot.
    """

    order: Any
    pivots: Any
    starts: Any
    columns: Any
    shares: Any


@inner()
def octave(share: float) -> int:
    """Return the number of the octave of a share from 0 to 1: the last one holds the shares from 1/2 on."""
    return max(0, NEWTON.octaves - 1 - max(0, 1022 - (bits_of_float64(share) >> np.int64(52))))


@inner()
def next_phase(phase: float) -> float:
    """Return the next number in place of a random one, from 0 to 1."""
    phase += NEWTON.golden_ratio
    return phase if phase < 1 else phase - 1


@inner()
def sort_shares(shares: Any, work: Any) -> None:
    """Write the shares in ascending order, and their places, by insertion."""
    places, kept = work.places, work.kept
    for a in range(shares.shape[0]):
        b = a
        while b > 0 and kept[b - 1] > shares[a]:
            places[b], kept[b] = places[b - 1], kept[b - 1]
            b -= 1
        places[b], kept[b] = a, shares[a]


@inner(allocates=True)
def build_thinning(columns: int, shares_of_octave: int) -> Thinning:
    """Return scratch for rows of at most so many shares."""
    bounds = np.empty(NEWTON.octaves + 2, np.int64)
    return Thinning(np.empty(columns, np.int64), np.empty(columns), np.empty(columns), bounds, shares_of_octave)


@inner()
def thin_out(shares: Any, work: Any, phase: float) -> int:
    """Write shares and their places, from light to heavy octaves; return how many there are.

    Where an octave has more than `shares_of_octave`, so many of them stand for all, with equal parts of their sum.
    """
    places, kept, bounds, max_shares = work.places, work.kept, work.bounds, work.shares_of_octave
    for k in range(bounds.shape[0]):
        bounds[k] = 0
    for a in range(shares.shape[0]):
        bounds[octave(shares[a]) + 2] += 1
    for b in range(NEWTON.octaves):
        bounds[b + 2] += bounds[b + 1]
    for a in range(shares.shape[0]):
        b = octave(shares[a]) + 1
        places[bounds[b]] = a
        bounds[b] += 1
    count = 0
    for b in range(NEWTON.octaves):
        start, stop, total = bounds[b], bounds[b + 1], 0.0
        chosen, spacing = min(stop - start, max_shares), (stop - start) / max_shares
        for a in range(start, stop):
            total += shares[places[a]]
        for k in range(chosen):
            place = places[start + k if spacing <= 1 else min(start + int((k + phase) * spacing), stop - 1)]
            places[count], kept[count] = place, shares[place] if spacing <= 1 else total / chosen
            count += 1
    return count


@inner()
def first_at_most(values: Any, start: int, stop: int, bound: float) -> int:
    """Return the first place from `start` on whose value is at most the bound.

    The values fall, and the last one is at most the bound.
    """
    low, high = start, stop - 1
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= bound:
            high = middle
        else:
            low = middle + 1
    return low


@inner()
def add_tree(edges: Any, ranks: Any, columns: Any, shares: Any, scale: float, work: Any, phase: float) -> float:
    """Add a tree of edges between columns in place of edges of weights `scale shares[a] shares[b]` between all.

    Returns the next phase, a number in place of a random one.
    """
    count = shares.shape[0]
    if count <= NEWTON.max_sorted:
        sort_shares(shares, work)
    else:
        count = thin_out(shares, work, phase)
    places, kept, heavier, total = work.places, work.kept, work.heavier, 0.0
    for a in range(count - 1, -1, -1):
        heavier[a] = total
        total += kept[a]
    for a in range(count - 1):
        weight = scale * kept[a] * heavier[a]
        if not weight > 0:
            continue
        phase = next_phase(phase)
        b = first_at_most(heavier, a + 1, count, phase * heavier[a])
        first, second = columns[places[a]], columns[places[b]]
        if ranks[first] > ranks[second]:
            first, second = second, first
        place = edges.heads[-1]
        edges.heads[-1] = edges.nexts[place]
        edges.columns[place], edges.weights[place] = second, weight
        edges.nexts[place], edges.heads[first] = edges.heads[first], place
    return phase


@inner()
def remove_neighbours(edges: Any, j: int, places: Any, near: Any, weights: Any) -> int:
    """Write the neighbours of column j and the sums of their edges, and free these edges; return their number.

    `places` is -1 for all columns, and so again at the end.
    """
    count = 0
    while edges.heads[j] >= 0:
        e = edges.heads[j]
        edges.heads[j], edges.nexts[e], edges.heads[-1] = edges.nexts[e], edges.heads[-1], e
        neighbour = edges.columns[e]
        if places[neighbour] < 0:
            places[neighbour], near[count], weights[count] = count, neighbour, 0.0
            count += 1
        weights[places[neighbour]] += edges.weights[e]
    for a in range(count):
        places[near[a]] = -1
    return count


@inner(allocates=True)
def elimination_order(cells: Any, m: int) -> Any:
    """Return the columns, from few cells to many."""
    counts, places, order = filled_integers(m, 0), filled_integers(cells.starts.shape[0] + 1, 0), np.empty(m, np.int64)
    for e in range(cells.columns.shape[0]):
        counts[cells.columns[e]] += 1
    for j in range(m):  # a column has at most one cell in each row
        places[counts[j] + 1] += 1
    for k in range(places.shape[0] - 1):
        places[k + 1] += places[k]
    for j in range(m):
        order[places[counts[j]]] = j
        places[counts[j]] += 1
    return order


@inner(allocates=True)
def factorise(cells: Any, rows: Any, damping: float, excess: Any, order: Any, shares_of_octave: int) -> Factor:
    """Return an approximate factor of H. `excess`, the diagonal beside the Laplacian, is overwritten.

    With the diagonal of H as the preconditioner instead, divergence 500 0.05 on clouds with axes of two scales takes 30
    times as long, and on clusters 12 times.
    """
    m, size, phase = order.shape[0], cells.columns.shape[0], 0.5
    ranks = np.empty(m, np.int64)
    for k in range(m):
        ranks[order[k]] = k
    edges = Edges(filled_integers(m + 1, -1), np.empty(size, np.int64), np.empty(size, np.int32), np.empty(size))
    for e in range(size):
        edges.nexts[e] = e - 1
    edges.heads[m] = size - 1
    work = build_thinning(m, shares_of_octave)
    for i in range(rows.mass.shape[0]):
        first, stop, scale = cells.starts[i], cells.starts[i + 1], damping * rows.mass[i]
        phase = add_tree(edges, ranks, cells.columns[first:stop], cells.shares[first:stop], scale, work, phase)
    pivots, starts, columns, shares = np.empty(m), filled_integers(m + 1, 0), np.empty(size, np.int32), np.empty(size)
    places, near, weights = filled_integers(m, -1), np.empty(m, np.int32), np.empty(m)
    for k in range(m):
        j, start = order[k], starts[k]
        count = remove_neighbours(edges, j, places, near, weights)
        pivots[k], starts[k + 1] = excess[j], start + count
        for a in range(count):
            pivots[k] += weights[a]
        if start + count > columns.shape[0]:
            columns, shares = resize(columns, shares, 2 * (start + count))
        for a in range(count):
            columns[start + a], shares[start + a] = near[a], weights[a] / pivots[k]
            excess[near[a]] += shares[start + a] * excess[j]
        if count > 1:
            part = shares[start : start + count]
            phase = add_tree(edges, ranks, near[:count], part, pivots[k], work, phase)
    return Factor(order, pivots, starts, columns, shares)


@inner()
def precondition(factor: Any, residual: Any, out: Any) -> None:
    """Write the solution of the approximate equations."""
    for j in range(out.shape[0]):
        out[j] = residual[j]
    for k in range(out.shape[0]):
        value = out[factor.order[k]]
        for e in range(factor.starts[k], factor.starts[k + 1]):
            out[factor.columns[e]] += factor.shares[e] * value
    for k in range(out.shape[0] - 1, -1, -1):
        total = out[factor.order[k]] / factor.pivots[k] if factor.pivots[k] > 0 else 0.0
        for e in range(factor.starts[k], factor.starts[k + 1]):
            total += factor.shares[e] * out[factor.columns[e]]
        out[factor.order[k]] = total


# ---- the equations ---------------------------------------------------------------------------------------------------


@inner(fastmath={"contract", "nsz", "reassoc"})
def apply_curvature(cells: Any, rows: Any, diagonal: Any, damping: float, x: Any, out: Any) -> None:
    """Write H x; `damping` is k_p, and the diagonal is c + s_q t with its ridge."""
    for j in range(x.shape[0]):
        out[j] = diagonal[j] * x[j]
    for i in range(rows.mass.shape[0]):
        total = 0.0
        for e in range(cells.starts[i], cells.starts[i + 1]):
            total += cells.shares[e] * x[cells.columns[e]]
        total *= damping * rows.mass[i]
        for e in range(cells.starts[i], cells.starts[i + 1]):
            out[cells.columns[e]] -= cells.shares[e] * total


def build_conjugate_gradients(precondition: Any) -> Any:
    """Return conjugate gradients with the preconditioner M: `precondition(factor, residual, out)` writes M residual.

    It is not an argument of the kernel, since numba does not keep kernels on disk that receive functions.
    """

    @inner(allocates=True)
    def conjugate_gradients(
        counter: Any, cells: Any, rows: Any, diagonal: Any, damping: float, factor: Any, residual: Any, share: float,
        error: float, x: Any,
    ) -> bool:  # fmt: skip
        """Write the solution x of H x = residual; the residual is overwritten by what remains of it.

        The iteration ends when at most `share` of the energy residual^T M residual remains, or after `max_products`,
        and then returns False. `error` is for messages about the progress.
        """
        m = x.shape[0]
        product, preconditioned, direction, energy = np.empty(m), np.empty(m), np.empty(m), 0.0
        precondition(factor, residual, preconditioned)
        for j in range(m):
            x[j], direction[j] = 0.0, preconditioned[j]
            energy += residual[j] * direction[j]
        enough = share * energy
        for _ in range(NEWTON.max_products):
            if not energy > enough or is_stopped(counter, error, np.nan):
                return True
            apply_curvature(cells, rows, diagonal, damping, direction, product)
            curvature, next_energy = 0.0, 0.0
            for j in range(m):
                curvature += direction[j] * product[j]
            if not curvature > 0:
                return True
            for j in range(m):
                x[j] += energy / curvature * direction[j]
                residual[j] -= energy / curvature * product[j]
            precondition(factor, residual, preconditioned)
            for j in range(m):
                next_energy += preconditioned[j] * residual[j]
            for j in range(m):
                direction[j] = preconditioned[j] + next_energy / energy * direction[j]
            energy = next_energy
        return not energy > enough

    return conjugate_gradients


solve_equations = build_conjugate_gradients(precondition)


@compiled(allocates=True, by_address=True)
def find_step(
    counter: Any, cells: Any, rows: Any, columns: Any, order: Any, epsilon: float, error: float, x: Any
) -> None:  # fmt: skip
    """Write the step x of b: the approximate solution of H x = t - c."""
    m, pull, ratio = x.shape[0], epsilon / rows.rho, epsilon / columns.rho
    damping = 1 / (1 + pull)
    diagonal, residual, excess = np.empty(m), np.empty(m), np.empty(m)
    if CHECKED:
        check_masses(rows, columns)
        check_shares(cells)
    for j in range(m):
        wanted = target(columns, j)
        residual[j] = wanted - columns.mass[j]
        excess[j] = pull * damping * columns.mass[j] + (ratio + NEWTON.ridge * error + NEWTON.smallest_ridge) * wanted
        diagonal[j] = excess[j] + damping * columns.mass[j]
    factor = factorise(cells, rows, damping, excess.copy(), order, NEWTON.shares_of_octave)
    share = NEWTON.residual**2 * min(1.0, error)
    if solve_equations(counter, cells, rows, diagonal, damping, factor, residual, share, error, x):
        return
    # Light cells decide where no others join two parts, as beside the dummy bins of partial transport.
    factor, first_solution = factorise(cells, rows, damping, excess, order, m), x.copy()
    solve_equations(counter, cells, rows, diagonal, damping, factor, residual, share, error, x)
    for j in range(m):
        x[j] += first_solution[j]
