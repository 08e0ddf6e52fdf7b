"""Every public function that takes numbers, with inputs: what tests of the surroundings and of derivatives go over.

The key begins with the function's name. Inputs are in float64; `fixed` ones have no derivative. The value may be
anything of the result that has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import otloss
from otloss import losses
from tests.otloss import gradient_cases
from tests.otloss.draws import draw
from tests.otloss.gradient_cases import COSTS, ENTROPIC, PLAIN, SQUARE, Inputs, entropic_case, transport_case, weights

LABELS = torch.tensor([0, 3, 1])


@dataclass(frozen=True)
class Entry:
    inputs: Inputs
    value: Callable[[Inputs], Tensor]
    fixed: Inputs = field(default_factory=dict)


def of(function: Callable[..., Tensor], inputs: Inputs, fixed: Inputs | None = None, **settings: Any) -> Entry:
    """The inputs are named as the function's arguments."""
    return Entry(inputs, lambda t: function(**t, **settings), fixed or {})


def _pair(**more: Tensor) -> Inputs:
    return {**weights(4, 5, empty=False), **more}


def _tight(t: Inputs) -> dict[str, Any]:
    """Return the tightest settings that the dtype of the inputs allows."""
    return {"epsilon": 0.3, "tolerance": 1e-10 if next(iter(t.values())).dtype == torch.float64 else None}


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(0)


def _on_every_cost() -> dict[str, Entry]:
    """Functions that read the kind of the cost with each of them; the others, and settings of Sinkhorn, in turn."""
    exact = [("emd", "emd", name) for name in COSTS] + [("lower_bound", "lower", name) for name in COSTS]
    exact += [("solve", "solve", name) for name in list(COSTS)[::4]]
    exact += [("upper_bound", "best", name) for name in SQUARE[::2]]
    cases = {f"{f} of {name}": transport_case(PLAIN[short], name, empty=False) for f, short, name in exact}
    for k, name in enumerate(COSTS):
        short = ENTROPIC[k % 3]
        function = {"divergence": "sinkhorn_divergence", "linear_cost": "solve"}.get(short, short)
        grad = "implicit" if short == "linear_cost" or k % 4 > 1 else "envelope"
        penalty = 0.5 if k % 5 == 4 else None
        cases[f"{function}, {grad}, of {name}"] = entropic_case(short, name, 0.3, penalty, grad, empty=False)
    return {name: Entry(case.inputs, case.value) for name, case in cases.items()}


def _transport() -> dict[str, Entry]:
    cost, never = draw(2, 4, 5), {"never": draw(2, 4, 5, seed=4) < 0.3}
    apart = {"p": 1.5 * _pair()["p"], "q": _pair()["q"], "cost": cost, "mass": torch.tensor([0.4, 0.7]).double()}
    graphs = {"C_x": draw(2, 4, 4), "C_y": draw(5, 5, seed=1), "feature_cost": draw(4, 5)}
    images = {"p": weights(2, 5, empty=False)["p"].repeat(1, 2), "C": draw(4, 4) + 0.1, "weights": draw(2)}
    clouds = {"x": draw(2, 4, 3), "y": draw(2, 5, 3, seed=1)}
    weighed = {**clouds, **dict(zip("ab", weights(4, 5, empty=False).values(), strict=True))}
    directions = {"projections": draw(7, 3, seed=2) - 0.5}

    averaged = {"clouds": draw(2, 3, 5, 2), "weights": torch.tensor([0.5, 0.2, 0.3]).double()}
    gaussians = {"A": draw(2, 3, 3), "B": draw(3, 3, seed=1), "mean_p": draw(3), "mean_q": draw(2, 3, seed=2)}

    unit = 2 * torch.eye(3).double()

    def bures(t: Inputs) -> Tensor:
        covariances = (unit.to(t[name]) + (t[name] + t[name].mT) / 2 for name in "AB")
        return otloss.bures_wasserstein(*covariances, mean_p=t["mean_p"], mean_q=t["mean_q"])

    def average(t: Inputs, optimize: str) -> Tensor:
        return otloss.cloud_barycenter(**t, start=START.to(t["clouds"]), optimize=optimize).value

    def value_of(**given: Any) -> Tensor:
        return otloss.fused_gromov(**given, tolerance=1e-14).value

    def forbidden(function: Callable[..., Tensor], shift: float, **options: Any) -> Entry:
        def value(t: Inputs) -> Tensor:
            allowed = t["cost"].masked_fill(t["never"], torch.inf) - shift
            return function(t["p"], t["q"], allowed, **(options and {**options, **_tight(t)}))

        return Entry(_pair(cost=cost), value, never)

    def barycenter(t: Inputs, *, debiased: bool) -> Tensor:
        p, shares = (t[name] / t[name].sum(-1, keepdim=True) for name in ("p", "weights"))
        # At 0.3 the blur hides what the debiased one has to find, up to 1e-9.
        options = _tight(t) | ({"epsilon": 0.1} if debiased else {})
        cost = (t["C"] + t["C"].mT) / 2
        if debiased:  # free on the diagonal, so that there is one barycenter
            cost = cost * (1 - torch.eye(len(cost), dtype=cost.dtype, device=cost.device))
        return otloss.barycenter(p, cost, shares, debiased=debiased, **options)

    return {
        "emd, negative costs": of(otloss.emd, _pair(cost=cost - 0.5)),
        "emd, mass": of(otloss.emd, apart),
        "emd, forbidden": forbidden(otloss.emd, 0.0),
        "sinkhorn, forbidden": forbidden(otloss.sinkhorn, 0.5, grad="implicit"),
        **{
            f"sinkhorn, mass, {grad}": Entry(apart, lambda t, g=grad: otloss.sinkhorn(**t, grad=g, **_tight(t)))
            for grad in ("envelope", "implicit")
        },
        "fused_gromov": of(value_of, {**graphs, **weights(4, 5, empty=False)}),
        "fused_gromov, epsilon": of(value_of, graphs, epsilon=0.2, max_iterations=2000),
        "cloud_barycenter": Entry(averaged, partial(average, optimize="points")),
        "cloud_barycenter, masses": Entry(averaged, partial(average, optimize="both")),
        "bures_wasserstein": Entry(gaussians, bures),
        "sinkhorn, negative costs, penalties": of(
            otloss.sinkhorn, _pair(cost=cost - 0.5), epsilon=0.3, marginal_penalty=(0.4, 2.0)
        ),
        "barycenter": Entry(images, partial(barycenter, debiased=False)),
        "barycenter, debiased": Entry(images, partial(barycenter, debiased=True)),
        "cloud_loss, divergence": of(otloss.cloud_loss, weighed, blur=0.5),
        "cloud_loss, emd": of(otloss.cloud_loss, weighed, kind="emd"),
        "cloud_loss, sliced": of(otloss.cloud_loss, weighed, kind="sliced", **directions),
        "cloud_loss of lists": Entry(
            clouds, lambda t: otloss.cloud_loss(list(t["x"]), [t["y"][0], t["y"][1, :3]], kind="emd")
        ),
    }


def _closed_forms() -> dict[str, Entry]:
    names = {"cdf": "cdf_distance", "quantiles": "wasserstein_1d", "circle": "wasserstein_circular"}
    names |= {"tree": "wasserstein_tree", "sliced": "sliced_wasserstein"}
    cases = gradient_cases.CLOSED_FORMS
    actual = {f"{names[name.split()[0]]}, {name}": Entry(make(), value) for name, (make, value) in cases.items()}
    places = {"x": draw(4), "y": draw(2, 5, seed=1)}
    actual["wasserstein_1d, uniform"] = of(otloss.wasserstein_1d, places, p=None, q=None)
    around = {"x": draw(4), "y": draw(2, 5, seed=1), **weights(4, 5, empty=False)}
    actual["wasserstein_circular, order 2"] = of(otloss.wasserstein_circular, around, order=2, period=0.8)
    actual["wasserstein_circular, samples"] = of(otloss.wasserstein_circular, places, p=None, q=None, period=0.8)
    actual["wasserstein_circular, equal steps"] = of(otloss.wasserstein_circular, weights(4, 4, empty=False))
    for way in ("entropy", "quadratic"):
        for function, more in ((otloss.soft_sort, {}), (otloss.soft_rank, {}), (otloss.soft_top_k, {"k": 2})):
            actual[f"{function.__name__}, {way}"] = of(function, {"x": draw(3, 6)}, regularization=way, **more)
    return actual


def _of_logits() -> dict[str, Entry]:
    places = torch.tensor([0.2, 1.4, 2.9])
    logits, bins, labels = {"logits": draw(3, 4)}, {"bins": torch.arange(4.0)}, {"target": LABELS}
    soft = {"logits": draw(2, 3), "target": weights(3, 4)["p"]}
    more = {"x": torch.arange(4.0).double() ** 2, "sample_weight": draw(3), "class_weight": draw(4)}
    tokens = {"labels": LABELS % 3, "values": torch.tensor([1.0, 2.0, 5.0, torch.nan])}
    head = {"score": 4 * draw(2, 3) - 2, "log_gaps": draw(2)}
    ordinal, histogram, number = losses.ordinal_loss, losses.histogram_loss, losses.number_token_loss
    return {
        "ordinal_loss": of(ordinal, logits, labels),
        "ordinal_loss, values": of(ordinal, logits | more, labels, cross_entropy=0.3, reduction="none"),
        "ordinal_loss, soft": of(ordinal, soft, cross_entropy=0.3),
        "ordinal_loss, soft with a cost": of(ordinal, soft | {"cost": draw(3, 3)}),
        "ordinal_loss, circular": of(ordinal, logits, labels, circular=True),
        "ordinal_loss, cost": of(ordinal, logits | {"cost": draw(4, 4)}, labels),
        "number_token_loss, vocabulary": of(number, logits, tokens, scaling="absolute"),
        "number_token_loss, numbers": of(number, logits, tokens, form="mse", over="numbers", scaling="absolute"),
        "histogram_loss, two_hot": of(histogram, logits | {"target": 3 * draw(3)}, bins),
        "histogram_loss, gaussian": of(histogram, logits | {"target": 3 * draw(3)}, bins, encoding="gaussian"),
        "histogram_loss, one_hot": of(histogram, logits, bins, target=places, encoding="one_hot"),
        "histogram_mean": of(losses.histogram_mean, logits, bins),
        "histogram_labels": of(losses.histogram_labels, {"values": 3 * draw(3)}, bins, count=4),
        "threshold_loss": of(losses.threshold_loss, logits, labels),
        "threshold_loss, immediate": of(losses.threshold_loss, logits, labels, kind="immediate"),
        **{
            f"cumulative_log_probabilities, {link}": of(losses.cumulative_log_probabilities, head, link=link)
            for link in ("logit", "probit", "cloglog")
        },
    }


def _others() -> dict[str, Entry]:
    ensemble = {"ensemble": draw(3, 5), "observation": draw(3, seed=1)}
    texts = {"x": draw(2, 4, 3) - 0.5, "y": draw(2, 5, 3, seed=1) - 0.5}
    mask = {"mask_x": torch.tensor([[True] * 4, [True] * 3 + [False]])}
    cost, sizes = {"cost": draw(2, 4, 3), "unmatched": draw(2, 4, seed=1)}, torch.tensor([[4, 3], [3, 2]])
    document = {"p": weights(3, 3)["p"], "q": weights(3, 3)["q"], "embedding": draw(6, 3)}
    ids = {"ids_p": torch.tensor([0, 1, 2]), "ids_q": torch.tensor([3, 5, 4])}
    domains = {"source": draw(3, 2), "target": draw(4, 2, seed=1), "logits": draw(4, 4)}
    critic = {"real": draw(4, 2), "fake": draw(4, 2, seed=1)}

    def penalty(t: Inputs) -> Tensor:
        def quadratic(z: Tensor) -> Tensor:
            return (z.to(t["W"]) @ t["W"]).square().sum(-1)

        return losses.gradient_penalty(quadratic, t["real"], t["fake"], generator=_generator())

    return {
        "crps": of(losses.crps, ensemble),
        "crps, fair": of(losses.crps, ensemble, fair=True),
        "crps, weights": of(losses.crps, ensemble | {"weights": draw(5, seed=2)}, fair=True),
        "ngram_distance, cosine": of(losses.ngram_distance, texts, mask, n=2, order_weight=0.3, metric="cosine"),
        "ngram_distance, euclidean": of(losses.ngram_distance, texts, mask, n=2, order_weight=0.3, metric="euclidean"),
        "set_loss": of(losses.set_loss, cost, reduction="none"),
        "set_loss, sizes": of(losses.set_loss, cost, {"sizes": sizes}),
        "set_loss, epsilon": of(losses.set_loss, cost, epsilon=0.3),
        "document_distance": of(losses.document_distance, document, ids),
        "jdot_loss": of(losses.jdot_loss, domains, {"labels": LABELS}),
        "jdot_loss, epsilon": of(losses.jdot_loss, domains, {"labels": LABELS}, epsilon=0.3),
        "critic_loss": of(losses.critic_loss, critic),
        "generator_loss": of(losses.generator_loss, {"fake": draw(4)}),
        "gradient_penalty": Entry({"W": draw(2, 2)}, penalty, critic),
        "register": Entry(
            {"x": draw(5, 2), "y": draw(5, 2)}, lambda t: otloss.register(**t, epsilon=0.01, steps=20).rotation
        ),
    }


START = draw(4, 2, seed=5)
FUNCTIONS: dict[str, Entry] = {**_on_every_cost(), **_transport(), **_closed_forms(), **_of_logits(), **_others()}
# Their results are indices: nothing to differentiate.
_POINTS = {"x0": draw(4, 2), "x1": draw(5, 2, seed=1)}
_WORDS = 1.0 - torch.eye(4, dtype=torch.float64)
OF_INDICES: dict[str, Entry] = {
    "match": Entry({"cost": draw(2, 4, 3)}, lambda t: torch.stack(otloss.match(t["cost"]))),
    "match, lists": Entry({"cost": draw(2, 4, 3)}, lambda t: torch.stack(otloss.match(list(t["cost"]))[1])),
    "pair": of(otloss.pair, _POINTS),
    "pair, epsilon": Entry(_POINTS, lambda t: otloss.pair(**t, epsilon=0.1, generator=_generator())),
    "decode_classes": of(losses.decode_classes, {"logits": draw(3, 4)}, rule="mean"),
    "soft_labels": Entry(
        {"logits": draw(2, 3)}, lambda t: losses.soft_labels(t["logits"].argmax(-1), 3, "beta", dtype=t["logits"].dtype)
    ),
    "document_search": Entry(
        {"corpus": _WORDS, "embedding": draw(4, 2)},
        lambda t: otloss.document_search(**t, k=2).distances,
        {"query": _WORDS[:2]},
    ),
}
