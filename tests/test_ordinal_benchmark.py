"""The protocol of the ordinal benchmark on made-up fits, and a small run if its peers are installed."""

import numpy as np
import pytest

pytest.importorskip("pandas")


from benchmarks import ordinal
from benchmarks.ordinal_data import OrdinalSet
from benchmarks.ordinal_models import OURS, Model


def test_mean_ranks_order_contestants_and_share_ties() -> None:
    rps = {"good": [0.1, 0.2], "bad": [0.5, 0.4], "as good": [0.2, 0.1]}
    sets = [OrdinalSet(f"set {k}", np.zeros((3, 1)), np.arange(3)) for k in range(2)]
    contestants = [Model(name, "linear", OURS, lambda seed, classes: None) for name in rps]
    fits: ordinal.Fits = {
        (one.name, name): {h: dict.fromkeys((*ordinal.SCORES, "seconds"), v) for h, v in enumerate(values)}
        for one in sets
        for name, values in rps.items()
    }
    assert ordinal.mean_ranks(sets, contestants, fits, "rps") == {"good": 1.5, "bad": 3.0, "as good": 1.5}
    assert ordinal.mean_ranks(sets, contestants, fits, "qwk") == {"good": 2.5, "bad": 1.0, "as good": 2.5}


def test_the_corrected_test_is_stricter_than_the_plain_one() -> None:
    from scipy import stats

    differences = np.random.default_rng(0).normal(0.5, 1.0, 30)
    plain = stats.ttest_1samp(differences, 0.0)
    shared = ordinal.HELD_OUT / (1 - ordinal.HELD_OUT)
    expected = 2 * stats.t.sf(abs(plain.statistic) / np.sqrt(1 + 30 * shared), 29)
    assert ordinal.resampled_t_test(differences) == pytest.approx(expected)
    assert ordinal.resampled_t_test(differences) > plain.pvalue
    assert ordinal.resampled_t_test(np.zeros(30)) == 1.0
