"""A million histograms and a hundred thousand documents on Dask: partitions go to functions of the library.

    values = pairs.map_blocks(line_distances, drop_axis=(1, 2), dtype=float)      # wasserstein_1d of (rows, 2, bins)
    found = client.map(nearest, corpus, firsts)                                   # document_search of a partition

A function takes the rows of a partition and returns a number for each: the engine moves them, shows the progress, and
computes the partitions of a lost worker again. Workers have one thread each, since partitions are what runs in
parallel, and the kernels are compiled before, once on each machine. Ray and Spark take the same functions, and run
where they are installed; neither was tried yet.

Data: histograms and documents are drawn from a seed in the partition that needs them.
Result: the values are those of a loop of calls, also after a worker was killed; the run prints the pairs a second.

    python examples/many_problems.py --workers 2
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
from dask import array, delayed
from dask.distributed import Client, LocalCluster, progress, wait
from matplotlib import pyplot as plt
from scipy.sparse import csr_array

from otloss import document_search, emd, warm_up, wasserstein_1d
from otloss.costs import GridCost

BINS, WORDS, NEAREST = 64, 5000, 10
COST = GridCost((8, 8))
Function = Callable[[np.ndarray], np.ndarray]  # of the pairs of a partition


def draw_pairs(count: int, seed: int) -> np.ndarray:
    """Return pairs of histograms, (count, 2, BINS)."""
    pairs = np.random.default_rng(seed).gamma(0.5, size=(count, 2, BINS))
    return pairs / pairs.sum(2, keepdims=True)


def draw_documents(count: int, seed: int) -> csr_array:
    """Return documents of 10 to 30 words, counts (count, WORDS); word i is drawn with a frequency like 1 / (i + 10)."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(random.integers(10, 31, count))])
    shares = 1 / (np.arange(WORDS) + 10)
    words = random.choice(WORDS, starts[-1], p=shares / shares.sum())
    return csr_array((np.ones(len(words)), words, starts), shape=(count, WORDS))


def queries() -> tuple[csr_array, torch.Tensor]:
    """Return ten documents, and the vectors of the words (WORDS, 25)."""
    return draw_documents(10, 2**32), torch.randn(WORDS, 25, generator=torch.Generator().manual_seed(0))


# ---- functions of a partition ----------------------------------------------------------------------------------------


def line_distances(pairs: np.ndarray) -> np.ndarray:
    """Return W_1 on a line of each pair, (rows,)."""
    return wasserstein_1d(*torch.from_numpy(pairs).unbind(1)).numpy()


def grid_distances(pairs: np.ndarray) -> np.ndarray:
    """Return the exact transport cost on a grid of 8 x 8 bins of each pair, (rows,)."""
    return emd(*torch.from_numpy(pairs).unbind(1), COST).numpy()


def grid_distances_by_pot(pairs: np.ndarray) -> np.ndarray:
    cost = COST.dense().double().numpy()
    return np.array([ot.emd2(p, q, cost) for p, q in pairs])


def nearest(corpus: csr_array, first: int) -> np.ndarray:
    """Return distances and numbers of the documents of a partition nearest to each query, (2, queries, NEAREST)."""
    bags, vectors = queries()
    found = document_search(bags, corpus, vectors, k=NEAREST)
    return np.stack([found.distances.numpy(), found.indices.numpy() + first])


# ---- engines ---------------------------------------------------------------------------------------------------------


def draw_array(count: int, block: int) -> array.Array:
    """Return pairs as a Dask array in partitions of `block` rows; none of them is drawn yet."""
    parts = [
        array.from_delayed(delayed(draw_pairs)(block, first), (block, 2, BINS), float)
        for first in range(0, count, block)
    ]
    return array.concatenate(parts)


def per_second(function: Function, pairs: array.Array) -> float:
    """Return how many pairs a second the cluster solves; the time to draw them is not counted."""
    wait(pairs := pairs.persist())
    start = time.perf_counter()
    progress(values := pairs.map_blocks(function, drop_axis=(1, 2), dtype=float).persist())
    wait(values)
    return len(pairs) / (time.perf_counter() - start)


def search(client: Client, count: int, block: int) -> tuple[np.ndarray, float]:
    """Return distances and numbers of the documents nearest to each query, (2, queries, NEAREST), and the seconds."""
    firsts = range(0, count, block)
    wait(corpus := client.map(draw_documents, [block] * len(firsts), firsts))
    start = time.perf_counter()
    progress(parts := client.map(nearest, corpus, firsts))
    found = np.concatenate(client.gather(parts), axis=2)
    order = np.argsort(found[:1], axis=2, kind="stable")[:, :, :NEAREST]
    return np.take_along_axis(found, order, axis=2), time.perf_counter() - start


def on_ray(function: Function, parts: list[np.ndarray]) -> list[np.ndarray]:
    import ray

    return ray.get([ray.remote(function).remote(part) for part in parts])


def on_spark(function: Function, parts: list[np.ndarray]) -> list[np.ndarray]:
    from pyspark.sql import SparkSession

    return SparkSession.builder.getOrCreate().sparkContext.parallelize(parts, len(parts)).map(function).collect()


ENGINES = {"ray": on_ray, "pyspark": on_spark}


def measure(client: Client, pairs: int, documents: int, block: int) -> dict[str, float]:
    """Return the pairs a second of each way, and print them."""
    rates = {
        "line, wasserstein_1d": per_second(line_distances, draw_array(pairs, block)),
        "grid, emd": per_second(grid_distances, draw_array(pairs // 10, block // 10)),
        "grid, POT": per_second(grid_distances_by_pot, draw_array(pairs // 100, block // 100)),
    }
    few, start = draw_pairs(pairs // 100, 0), time.perf_counter()
    expected = np.concatenate([grid_distances(few[i : i + 1]) for i in range(len(few))])
    rates["grid, emd, a loop without Dask"] = len(few) / (time.perf_counter() - start)
    found, seconds = search(client, documents, block)
    print("\n".join(f"{name:32}{rate:12,.0f} pairs a second" for name, rate in rates.items()))
    print(f"{documents:,} documents: {seconds:.2g} s for {len(found[0])} queries")
    for engine in filter(find_spec, ENGINES):
        values = np.concatenate(ENGINES[engine](grid_distances, np.array_split(few, 4)))
        print(f"{engine}: {abs(values - expected).max():.1g} from the loop at most")
    return rates


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("gallery-output"), help="folder of the figure")
    parser.add_argument("--quick", action="store_true", help="few problems")
    options = parser.parse_args(arguments)
    sizes: Any = (400, 400, 100) if options.quick else (1_000_000, 100_000, 10_000)
    warm_up("wasserstein_1d", "emd", "documents", dtypes=[torch.float64])  # on each machine of a cluster
    with LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster, Client(cluster) as client:
        rates = measure(client, *sizes)
    figure, ax = plt.subplots(figsize=(7, 2.4), layout="constrained")
    ax.bar_label(ax.barh(list(rates), list(rates.values()), color=["C0", "C0", "0.6", "0.6"]), fmt=" %.3g")
    ax.set(xscale="log", xlabel="pairs a second, two workers")
    ax.invert_yaxis()
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "many_problems.png", dpi=100)


if __name__ == "__main__":
    main()
