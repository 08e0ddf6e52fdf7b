"""A million histograms and a hundred thousand documents on Dask: partitions go to functions of the library.

    values = pairs.map_blocks(line_distances, drop_axis=(1, 2), dtype=float)      # wasserstein_1d of (rows, 2, bins)
    found = client.map(nearest, corpus, firsts)                                   # document_search of a partition

A function takes the rows of a partition and returns a number for each: the engine moves them, shows the progress, and
computes the partitions of a lost worker again. Workers have one thread each, since partitions are what runs in
parallel, and the kernels are compiled before, once on each machine. Ray and Spark take the same functions, and solve a
part of the problems where they are installed.

Data: histograms and documents are drawn from a seed in the partition that needs them.
Result: the values are as by one call, also after a worker was killed. `python -m benchmarks many_problems` compares
pairs a second with a loop of calls and with POT.

    python examples/many_problems.py --workers 2
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from dask import array, delayed
from dask.distributed import Client, LocalCluster, progress
from scipy.sparse import csr_array

from otloss import document_search, emd, warm_up, wasserstein_1d
from otloss.costs import GridCost

BINS, WORDS, NEAREST = 64, 5000, 10
COST = GridCost((8, 8))
Function = Callable[[np.ndarray], np.ndarray]  # a function of the pairs of a partition


def draw_pairs(count: int, seed: int) -> np.ndarray:
    """Return pairs of histograms, (count, 2, BINS)."""
    pairs = np.random.default_rng(seed).gamma(0.5, size=(count, 2, BINS))
    return pairs / pairs.sum(2, keepdims=True)


def draw_array(count: int, block: int) -> array.Array:
    """Return pairs as a Dask array in partitions of `block` rows; none of them is drawn yet."""
    parts = [array.from_delayed(delayed(draw_pairs)(block, i), (block, 2, BINS), float) for i in range(0, count, block)]
    return array.concatenate(parts)


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
    return wasserstein_1d(*torch.tensor(pairs).unbind(1)).numpy()


def grid_distances(pairs: np.ndarray) -> np.ndarray:
    """Return the exact transport cost on a grid of 8 x 8 bins of each pair, (rows,)."""
    return emd(*torch.tensor(pairs).unbind(1), COST).numpy()


def nearest(corpus: csr_array, first: int) -> np.ndarray:
    """Return distances and numbers of the documents of a partition nearest to each query, (2, queries, NEAREST)."""
    bags, vectors = queries()
    found = document_search(bags, corpus, vectors, k=NEAREST)
    return np.stack([found.distances.numpy(), found.indices.numpy() + first])


# ---- engines ---------------------------------------------------------------------------------------------------------


def on_dask(function: Function, pairs: array.Array) -> np.ndarray:
    progress(values := pairs.map_blocks(function, drop_axis=(1, 2), dtype=float).persist())
    return values.compute()


def on_ray(function: Function, parts: list[np.ndarray]) -> list[np.ndarray]:
    import ray

    return ray.get([ray.remote(function).remote(part) for part in parts])


def on_spark(function: Function, parts: list[np.ndarray]) -> list[np.ndarray]:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers need the same packages
    return SparkSession.builder.getOrCreate().sparkContext.parallelize(parts, len(parts)).map(function).collect()


ENGINES = {"ray": on_ray, "pyspark": on_spark}


def search(client: Client, count: int, block: int) -> np.ndarray:
    """Return distances and numbers of the documents nearest to each query, (2, queries, NEAREST)."""
    firsts = range(0, count, block)
    corpus = client.map(draw_documents, [block] * len(firsts), firsts)
    progress(parts := client.map(nearest, corpus, firsts))
    found = np.concatenate(client.gather(parts), axis=2)
    order = np.argsort(found[:1], axis=2, kind="stable")[:, :, :NEAREST]
    return np.take_along_axis(found, order, axis=2)


def run(client: Client, count: int, documents: int, block: int) -> None:
    """Solve everything; print the seconds, which include drawing, and how far values are from one call."""
    for function in (line_distances, grid_distances):
        start = time.perf_counter()
        values, few = on_dask(function, draw_array(count, block)), draw_pairs(block, 0)
        print(f"\n{function.__name__}: {count:,} pairs, mean {values.mean():.3g}, {time.perf_counter() - start:.3g} s")
        parts = {engine: ENGINES[engine](function, np.array_split(few, 4)) for engine in filter(find_spec, ENGINES)}
        for engine, part in {"dask": [values[:block]], **parts}.items():
            print(f"{engine}: {abs(np.concatenate(part) - function(few)).max():.1g} from one call at most")
    start = time.perf_counter()
    search(client, documents, block)
    print(f"\n{documents:,} documents, {time.perf_counter() - start:.3g} s for ten queries")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few problems")
    options = parser.parse_args(arguments)
    sizes = (400, 400, 100) if options.quick else (1_000_000, 100_000, 10_000)
    warm_up("wasserstein_1d", "emd", "documents", dtypes=[torch.float64])  # on each machine of a cluster
    with LocalCluster(n_workers=options.workers, threads_per_worker=1) as cluster, Client(cluster) as client:
        run(client, *sizes)


if __name__ == "__main__":
    main()
