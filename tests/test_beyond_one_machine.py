"""Boosting and many problems on Dask: two local workers give what one process does, and a killed one loses nothing."""

import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

for package in ("dask.dataframe", "distributed", "matplotlib", "ot", "xgboost", "lightgbm"):
    pytest.importorskip(package)

import dask  # noqa: E402
import lightgbm  # noqa: E402
import many_problems  # noqa: E402
import xgboost.dask  # noqa: E402
from dask import array  # noqa: E402
from dask.distributed import Client, LocalCluster, wait  # noqa: E402

from otloss import document_search  # noqa: E402
from otloss.boosting import (  # noqa: E402
    lightgbm_metric,
    lightgbm_objective,
    start_scores,
    xgboost_metric,
    xgboost_objective,
)
from otloss.estimators import OrdinalBoostingClassifier  # noqa: E402
from tests.test_readme import ON_A_CLUSTER, ROOT, run_page  # noqa: E402

K, ROUNDS, ROWS = 4, 3, 600
LOSS: dict[str, Any] = {"power": 1, "cross_entropy": 0.5, "class_weight": [1.0, 2.0, 1.0, 0.5]}
XGB = {"objective": "multi:softprob", "num_class": K, "nthread": 1, "max_depth": 3, "disable_default_eval_metric": True}
LGB: dict[str, Any] = {
    "num_class": K, "num_leaves": 7, "verbose": -1, "deterministic": True, "metric": "None", "min_data_in_bin": 1,
    "force_row_wise": True, "min_child_samples": 1, "min_child_weight": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two processes of one thread, which are gone afterwards."""
    settings = {"distributed.comm.timeouts.connect": "120s", "distributed.scheduler.worker-ttl": None}
    folder = tmp_path_factory.mktemp("workers")
    with (
        warnings.catch_warnings(action="ignore"),  # the libraries warn
        dask.config.set(settings),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=str(folder), host="127.0.0.1"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client
        pids = list(client.run(os.getpid).values())
    assert [pid for pid in pids if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of 16 values, so that the bins are the same wherever the rows are; labels; weights."""
    random = np.random.default_rng(0)
    X = random.integers(0, 16, (ROWS, 4)).astype(float)
    y = np.clip((X[:, 0] + X[:, 1] * (X[:, 2] > 7) + random.normal(size=ROWS) * 3) // 7, 0, K - 1).astype(int)
    return X, y, random.integers(1, 3, ROWS).astype(float)


def spread(client: Any, *tables: np.ndarray, first: float = 0.5) -> list[Any]:
    """The tables as Dask arrays, a part of the rows at each worker."""
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    spread = []
    for table in tables:
        parts = np.split(table, [int(first * len(table))])
        held = [client.scatter(part, workers=[worker]) for part, worker in zip(parts, workers, strict=True)]
        blocks = [array.from_delayed(h, p.shape, p.dtype) for h, p in zip(held, parts, strict=True)]
        spread.append(array.concatenate(blocks))
    return spread


def test_xgboost_grows_the_trees_of_one_process(client: Any, rows: Any) -> None:
    X, y, weights = rows
    settings = XGB | {"base_score": start_scores(y, K, sample_weight=weights).tolist()}
    objective, metric = pickle.loads(pickle.dumps((xgboost_objective(K, **LOSS), xgboost_metric(K, **LOSS))))
    data, history = xgboost.DMatrix(X, y, weight=weights), {}
    calls = {"num_boost_round": ROUNDS, "obj": objective, "custom_metric": metric, "verbose_eval": False}
    alone = xgboost.train(settings, data, evals=[(data, "train")], evals_result=history, **calls)
    on_dask = xgboost.dask.DaskDMatrix(client, *spread(client, X, y), weight=spread(client, weights)[0])
    assert len(on_dask.worker_map) == 2
    trained = xgboost.dask.train(client, settings, on_dask, evals=[(on_dask, "train")], **calls)
    ours, theirs = trained["booster"].trees_to_dataframe(), alone.trees_to_dataframe()
    assert ours["Feature"].equals(theirs["Feature"])
    np.testing.assert_allclose(ours["Split"], theirs["Split"])
    np.testing.assert_allclose(trained["booster"].predict(data), alone.predict(data), atol=1e-5)
    name = metric.__name__
    # The engine takes the mean over workers, whose weights are nearly the same here.
    np.testing.assert_allclose(trained["history"]["train"][name], history["train"][name], rtol=0.05)


@pytest.mark.filterwarnings("ignore:Parameter n_jobs will be ignored")  # LightGBM sets it itself, and warns
def test_lightgbm_grows_the_trees_of_one_process(client: Any, rows: Any) -> None:
    X, y, weights = rows
    start = start_scores(np.arange(K), K, sample_weight=np.bincount(y, weights))
    np.testing.assert_allclose(start, start_scores(y, K, sample_weight=weights), rtol=1e-12)
    starts = np.tile(start, (ROWS, 1))
    settings = LGB | {"objective": lightgbm_objective(K, interface="sklearn", **LOSS), "n_estimators": ROUNDS}
    metric = lightgbm_metric(K, interface="sklearn", **LOSS)
    alone = lightgbm.LGBMRegressor(n_jobs=1, **settings).fit(X, y, sample_weight=weights, init_score=starts)
    on_dask = spread(client, X, y, weights, starts)
    model = lightgbm.DaskLGBMRegressor(client=client, **settings)
    model.fit(
        *on_dask[:3], init_score=on_dask[3], eval_metric=metric, eval_X=on_dask[0], eval_y=on_dask[1],
        eval_sample_weight=on_dask[2:3], eval_init_score=on_dask[3:],
    )  # fmt: skip
    ours, theirs = model.booster_.trees_to_dataframe(), alone.booster_.trees_to_dataframe()
    assert ours["split_feature"].equals(theirs["split_feature"])
    np.testing.assert_allclose(model.predict(on_dask[0]).compute(), alone.predict(X), atol=1e-5)
    losses = model.evals_result_["valid_0"][metric.__name__]
    assert losses[-1] < losses[0], "of the rows of one worker"


def test_the_estimator_names_the_call_for_a_cluster() -> None:
    X, y = array.zeros((10, 2)), array.zeros(10, dtype=int)
    for booster, call in (("xgboost", r"xgboost\.dask\.train\(obj="), ("lightgbm", r"lightgbm\.DaskLGBMRegressor\(")):
        with pytest.raises(TypeError, match=rf"X is a Array of Dask, expected rows in memory.*{call}"):
            OrdinalBoostingClassifier(booster=booster).fit(X, y)


def test_the_nearest_documents_of_partitions_are_those_of_the_corpus(client: Any) -> None:
    from scipy.sparse import vstack

    found = many_problems.search(client, 60, 20)
    queries, vectors = many_problems.queries()
    corpus = vstack([many_problems.draw_documents(20, first) for first in (0, 20, 40)])
    expected = document_search(queries, corpus, vectors, k=many_problems.NEAREST)
    np.testing.assert_array_equal(found[1], expected.indices)
    np.testing.assert_allclose(found[0], expected.distances, rtol=1e-12)


def test_the_blocks_of_the_page_run_in_order(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this cluster."""
    monkeypatch.setattr("dask.distributed.Client", lambda **_: client)
    monkeypatch.setattr(client, "close", lambda: None)
    with warnings.catch_warnings(action="ignore"):  # the libraries warn
        run_page(ROOT / "docs" / ON_A_CLUSTER)


@pytest.mark.parametrize("engine", many_problems.ENGINES)
@pytest.mark.filterwarnings("ignore")  # the engines warn
def test_other_engines_return_the_values_of_one_call(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(engine)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((*sys.path, str(ROOT))))  # for the workers
    pairs = many_problems.draw_pairs(20, 0)
    found = many_problems.ENGINES[engine](many_problems.grid_distances, np.array_split(pairs, 2))
    np.testing.assert_array_equal(np.concatenate(found), many_problems.grid_distances(pairs))


def test_the_example_prints_values_of_one_call(client: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_problems, "ENGINES", {})
    many_problems.run(client, 40, 20, 10)
    assert capsys.readouterr().out.count("dask: 0 from one call at most") == 2


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(client: Any) -> None:
    """Partitions that it had solved are lost with it, and solved again; others go to its successor."""
    pairs, solve = [many_problems.draw_pairs(20, seed) for seed in range(16)], many_problems.grid_distances
    wait(solved := client.map(solve, pairs[:8]))
    address, pid = next(iter(client.run(os.getpid).items()))
    assert any(address in places for places in client.who_has(solved).values())
    os.kill(pid, signal.SIGKILL)
    values = client.gather([*solved, *client.map(solve, pairs[8:])])
    np.testing.assert_array_equal(values, list(map(solve, pairs)))
    for _ in range(600):
        if len(client.scheduler_info(n_workers=-1)["workers"]) == 2:
            break
        time.sleep(0.1)
    assert pid not in client.run(os.getpid).values(), "a new process is in its place"
