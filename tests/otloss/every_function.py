"""Every public function that takes numbers, with inputs: what tests of the surroundings and of derivatives go over.

The key begins with the function's name. Inputs are in float64; `fixed` ones have no derivative. The value may be
anything of the result that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import otloss
from otloss import losses
from tests.otloss.draws import draw
from tests.otloss.gradient_cases import (
    CLOSED_FORMS,
    COSTS,
    ENTROPIC,
    PLAIN,
    SQUARE,
    Inputs,
    entropic_case,
    transport_case,
    weights,
)

LABELS = torch.tensor([0, 3, 1])
VALUES = torch.tensor([1.0, 2.0, 5.0, torch.nan])
SIZES = torch.tensor([[4, 3], [3, 2]])


@dataclass(frozen=True)
class Entry:
    inputs: Inputs
    value: Callable[[Inputs], Tensor]
    fixed: Inputs = field(default_factory=dict)


def _pair(**more: Tensor) -> Inputs:
    return {**weights(4, 5, empty=False), **more}


def _same_bins(**more: Tensor) -> Inputs:
    return {**weights(4, 4, empty=False), **more}


def _tight(t: Inputs) -> dict[str, Any]:
    """As tight as the dtype of the inputs allows."""
    return {"epsilon": 0.3, "tolerance": 1e-10 if next(iter(t.values())).dtype == torch.float64 else None}


def _clouds() -> Inputs:
    return {"x": draw(2, 4, 3), "y": draw(2, 5, 3, seed=1)}


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _on_every_cost() -> dict[str, Entry]:
    """Functions that read the kind of the cost with each of them; the others, and settings of Sinkhorn, in turn."""
    exact = [("emd", "emd", name) for name in COSTS] + [("lower_bound", "lower", name) for name in COSTS]
    exact += [("solve", "solve", name) for name in list(COSTS)[::4]]
    exact += [("upper_bound", "best", name) for name in SQUARE[::2]]
    cases = {
        f"{function} of {name}": transport_case(PLAIN[short], name, empty=False) for function, short, name in exact
    }
    for k, name in enumerate(COSTS):
        short = ENTROPIC[k % 3]
        function = {"divergence": "sinkhorn_divergence", "linear_cost": "solve"}.get(short, short)
        grad = "implicit" if short == "linear_cost" or k % 4 > 1 else "envelope"
        penalty = 0.5 if k % 5 == 4 else None
        cases[f"{function}, {grad}, of {name}"] = entropic_case(short, name, 0.3, penalty, grad, empty=False)
    return {name: Entry(case.inputs, case.value) for name, case in cases.items()}


def _transport() -> dict[str, Entry]:
    matrix, never = {"C": draw(2, 4, 5)}, {"never": draw(2, 4, 5, seed=4) < 0.3}
    apart = {"p": 1.5 * _pair()["p"], "q": _pair()["q"], **matrix, "mass": torch.tensor([0.4, 0.7]).double()}
    graphs = {"C_x": draw(2, 4, 4), "C_y": draw(5, 5, seed=1), "M": draw(4, 5)}
    actual = {
        "emd, negative costs": Entry(_pair(C=draw(2, 4, 5) - 0.5), lambda t: otloss.emd(t["p"], t["q"], t["C"])),
        "emd, mass": Entry(
            apart, lambda t: otloss.emd(t["p"], t["q"], t["C"], mass=t["mass"])
        ),
        **{
            f"sinkhorn, mass, {grad}": Entry(
                apart, lambda t, g=grad: otloss.sinkhorn(t["p"], t["q"], t["C"], mass=t["mass"], grad=g, **_tight(t)),
            )
            for grad in ("envelope", "implicit")
        },
        "emd, forbidden": Entry(
            _pair(**matrix), lambda t: otloss.emd(t["p"], t["q"], t["C"].masked_fill(t["never"], torch.inf)), never
        ),
        "sinkhorn, forbidden": Entry(
            _pair(**matrix),
            lambda t: otloss.sinkhorn(
                t["p"], t["q"], t["C"].masked_fill(t["never"], torch.inf) - 0.5, grad="implicit", **_tight(t)
            ),
            never,
        ),
        "fused_gromov": Entry(
            {**graphs, **weights(4, 5, empty=False)}, lambda t: otloss.fused_gromov(*t.values(), tolerance=1e-14).value
        ),
        "fused_gromov, epsilon": Entry(
            graphs, lambda t: otloss.fused_gromov(*t.values(), epsilon=0.2, tolerance=1e-14, max_iterations=2000).value
        ),
        **{
            f"barycenter, debiased {debiased}": Entry(
                {"p": weights(2, 5, empty=False)["p"].repeat(1, 2), "C": draw(4, 4) + 0.1, "weights": draw(2)},
                lambda t, debiased=debiased: otloss.barycenter(
                    t["p"] / t["p"].sum(-1, keepdim=True), (t["C"] + t["C"].mT) / 2, t["weights"] / t["weights"].sum(),
                    debiased=debiased, **_tight(t)
                ),
            )
            for debiased in (False, True)
        },
    }  # fmt: skip
    clouds = {**_clouds(), **dict(zip("ab", weights(4, 5, empty=False).values(), strict=True))}
    for kind in ("divergence", "emd", "sliced"):
        more = {"projections": draw(7, 3, seed=2) - 0.5} if kind == "sliced" else {}
        actual[f"cloud_loss, {kind}"] = Entry(clouds, lambda t, k=kind, m=more: otloss.cloud_loss(**t, kind=k, **m))
    actual["cloud_loss of lists"] = Entry(
        _clouds(), lambda t: otloss.cloud_loss(list(t["x"]), [t["y"][0], t["y"][1, :3]], kind="emd")
    )
    return actual


def _closed_forms() -> dict[str, Entry]:
    sorts = {"soft_sort": otloss.soft_sort, "soft_rank": otloss.soft_rank}
    functions = {
        "cdf": "cdf_distance", "quantiles": "wasserstein_1d", "circle": "wasserstein_circular",
        "tree": "wasserstein_tree", "sliced": "sliced_wasserstein",
    }  # fmt: skip
    actual = {
        f"{functions[name.split()[0]]}, {name}": Entry(make(), value) for name, (make, value) in CLOSED_FORMS.items()
    } | {
        "wasserstein_1d, uniform": Entry(
            {"x": draw(4), "y": draw(2, 5, seed=1)}, lambda t: otloss.wasserstein_1d(None, None, **t)
        ),
        "wasserstein_circular, equal steps": Entry(_same_bins(), lambda t: otloss.wasserstein_circular(**t)),
    }
    for regularization in ("entropy", "quadratic"):
        for name, sort in sorts.items():
            actual[f"{name}, {regularization}"] = Entry(
                {"x": draw(3, 6)}, lambda t, s=sort, r=regularization: s(t["x"], regularization=r)
            )
        actual[f"soft_top_k, {regularization}"] = Entry(
            {"x": draw(3, 6)}, lambda t, r=regularization: otloss.soft_top_k(t["x"], 2, regularization=r)
        )
    return actual


def _of_logits() -> dict[str, Entry]:
    logits, bins = {"logits": draw(3, 4)}, torch.arange(4.0)
    soft = weights(3, 4)["p"]
    labels = {"labels": LABELS}
    values = {"values": VALUES}
    return {
        "ordinal_loss": Entry(logits, lambda t: losses.ordinal_loss(t["logits"], t["labels"]), labels),
        "ordinal_loss, values": Entry(
            {**logits, "x": bins.double() ** 2, "weight": draw(3)},
            lambda t: losses.ordinal_loss(
                t["logits"], t["labels"], x=t["x"], cross_entropy=0.3, sample_weight=t["weight"], reduction="none"
            ),
            labels,
        ),
        "ordinal_loss, soft": Entry(
            {"logits": draw(2, 3), "target": soft},
            lambda t: losses.ordinal_loss(t["logits"], t["target"], cross_entropy=0.3),
        ),
        "ordinal_loss, soft with a cost": Entry(
            {"logits": draw(2, 3), "target": soft, "cost": draw(3, 3)},
            lambda t: losses.ordinal_loss(t["logits"], t["target"], cost=t["cost"]),
        ),
        "ordinal_loss, circular": Entry(
            logits, lambda t: losses.ordinal_loss(t["logits"], t["labels"], circular=True), labels
        ),
        "ordinal_loss, cost": Entry(
            {**logits, "cost": draw(4, 4)},
            lambda t: losses.ordinal_loss(t["logits"], t["labels"], cost=t["cost"]),
            labels,
        ),
        **{
            f"number_token_loss, {form} over {over}": Entry(
                logits,
                lambda t, form=form, over=over: losses.number_token_loss(
                    t["logits"], t["labels"] % 3, t["values"], form=form, over=over, scaling="absolute"
                ),
                {**labels, **values},
            )
            for form, over in (("wasserstein", "vocabulary"), ("mse", "numbers"))
        },
        **{
            f"histogram_loss, {form}": Entry(
                {**logits, "target": 3 * draw(3)},
                lambda t, form=form: losses.histogram_loss(t["logits"], t["target"], t["bins"], encoding=form),
                {"bins": bins},
            )
            for form in ("two_hot", "gaussian")
        },
        "histogram_loss, one_hot": Entry(
            logits,
            lambda t: losses.histogram_loss(t["logits"], t["target"], t["bins"], encoding="one_hot"),
            {"bins": bins, "target": torch.tensor([0.2, 1.4, 2.9])},
        ),
        "histogram_mean": Entry(logits, lambda t: losses.histogram_mean(t["logits"], t["bins"]), {"bins": bins}),
        "histogram_labels": Entry(
            {"values": 3 * draw(3)}, lambda t: losses.histogram_labels(t["values"], t["bins"], 4), {"bins": bins}
        ),
        **{
            f"cumulative_log_probabilities, {link}": Entry(
                {"score": 4 * draw(2, 3) - 2, "log_gaps": draw(2)},
                lambda t, link=link: losses.cumulative_log_probabilities(**t, link=link),
            )
            for link in ("logit", "probit", "cloglog")
        },
        "threshold_loss": Entry(logits, lambda t: losses.threshold_loss(t["logits"], t["labels"]), labels),
        "threshold_loss, immediate": Entry(
            logits, lambda t: losses.threshold_loss(t["logits"], t["labels"], kind="immediate"), labels
        ),
    }  # fmt: skip


def _others() -> dict[str, Entry]:
    ensemble = {"ensemble": draw(3, 5), "observation": draw(3, seed=1)}
    texts = {"x": draw(2, 4, 3) - 0.5, "y": draw(2, 5, 3, seed=1) - 0.5}
    cost = {"cost": draw(2, 4, 3), "unmatched": draw(2, 4, seed=1)}
    critic = {"real": draw(4, 2), "fake": draw(4, 2, seed=1)}
    return {
        "crps": Entry(ensemble, lambda t: losses.crps(**t)),
        "crps, fair": Entry(ensemble, lambda t: losses.crps(**t, fair=True)),
        "crps, weights": Entry({**ensemble, "weights": draw(5, seed=2)}, lambda t: losses.crps(**t, fair=True)),
        **{
            f"ngram_distance, {metric}": Entry(
                texts,
                lambda t, metric=metric: losses.ngram_distance(
                    t["x"], t["y"], n=2, mask_x=t["mask"], order_weight=0.3, metric=metric
                ),
                {"mask": torch.tensor([[True] * 4, [True] * 3 + [False]])},
            )
            for metric in ("cosine", "euclidean")
        },
        "set_loss": Entry(cost, lambda t: losses.set_loss(**t, reduction="none")),
        "set_loss, sizes": Entry(
            cost, lambda t: losses.set_loss(t["cost"], t["unmatched"], sizes=t["sizes"]), {"sizes": SIZES}
        ),
        "set_loss, epsilon": Entry(cost, lambda t: losses.set_loss(**t, epsilon=0.3)),
        "document_distance": Entry(
            {"p": weights(3, 3)["p"], "q": weights(3, 3)["q"], "embedding": draw(6, 3)},
            lambda t: losses.document_distance(t["p"], t["q"], t["embedding"], ids_p=t["ids_p"], ids_q=t["ids_q"]),
            {"ids_p": torch.tensor([0, 1, 2]), "ids_q": torch.tensor([3, 5, 4])},
        ),
        "jdot_loss": Entry(
            {"source": draw(3, 2), "target": draw(4, 2, seed=1), "logits": draw(4, 4)},
            lambda t: losses.jdot_loss(t["source"], t["target"], t["labels"], t["logits"]),
            {"labels": LABELS},
        ),
        "jdot_loss, epsilon": Entry(
            {"source": draw(3, 2), "target": draw(4, 2, seed=1), "logits": draw(4, 4)},
            lambda t: losses.jdot_loss(t["source"], t["target"], t["labels"], t["logits"], epsilon=0.3),
            {"labels": LABELS},
        ),
        "critic_loss": Entry(critic, lambda t: losses.critic_loss(**t)),
        "generator_loss": Entry({"fake": draw(4)}, lambda t: losses.generator_loss(**t)),
        "gradient_penalty": Entry(
            {"W": draw(2, 2)},
            lambda t: losses.gradient_penalty(
                lambda z: (z.to(t["W"]) @ t["W"]).square().sum(-1), t["real"], t["fake"], generator=_generator()
            ),
            critic,
        ),
        "register": Entry(
            {"x": draw(5, 2), "y": draw(5, 2)}, lambda t: otloss.register(t["x"], t["y"], epsilon=0.01).rotation
        ),
    }  # fmt: skip


FUNCTIONS: dict[str, Entry] = {**_on_every_cost(), **_transport(), **_closed_forms(), **_of_logits(), **_others()}
# Their results are indices: nothing to differentiate.
OF_INDICES: dict[str, Entry] = {
    "match": Entry({"cost": draw(2, 4, 3)}, lambda t: torch.stack(otloss.match(t["cost"]))),
    "match, lists": Entry({"cost": draw(2, 4, 3)}, lambda t: torch.stack(otloss.match(list(t["cost"]))[1])),
    "pair": Entry({"x0": draw(4, 2), "x1": draw(5, 2, seed=1)}, lambda t: otloss.pair(t["x0"], t["x1"])),
    "pair, epsilon": Entry(
        {"x0": draw(4, 2), "x1": draw(5, 2, seed=1)},
        lambda t: otloss.pair(t["x0"], t["x1"], epsilon=0.1, generator=_generator()),
    ),
    "decode_classes": Entry({"logits": draw(3, 4)}, lambda t: losses.decode_classes(t["logits"], "mean")),
    "soft_labels": Entry(
        {"logits": draw(2, 3)}, lambda t: losses.soft_labels(t["logits"].argmax(-1), 3, "beta", dtype=t["logits"].dtype)
    ),
    "document_search": Entry(
        {"corpus": 1.0 - torch.eye(4, dtype=torch.float64), "embedding": draw(4, 2)},
        lambda t: otloss.document_search(t["query"], t["corpus"], t["embedding"], k=2).distances,
        {"query": 1.0 - torch.eye(4, dtype=torch.float64)[:2]},
    ),
}
