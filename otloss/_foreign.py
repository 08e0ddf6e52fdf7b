"""Names and keywords of other packages, and what to write here: the messages of calls that are not taken."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn


class _Keyword(NamedTuple):
    """The library of a keyword, the option here that takes its place (None: no option does), and what to do then."""

    library: str
    ours: str | None
    advice: str


class _Call(NamedTuple):
    """The library of the names, the names, and what to call here, with what differs."""

    library: str
    names: str
    ours: str


_LEAVE_OUT = "leave it out"
_KEYWORDS = {
    "loss": _Keyword("GeomLoss", "kind", 'kind="divergence" is its "sinkhorn"'),
    "p": _Keyword("GeomLoss", "metric", 'give metric="sqeuclidean" for p=2, metric="euclidean" for p=1'),
    "cost": _Keyword("GeomLoss", "metric", 'give metric="sqeuclidean" or "euclidean", or a function of two clouds'),
    "blur": _Keyword(
        "GeomLoss", "epsilon", "give epsilon=2 * blur**2 for squared distances (with half of the value), "
        "epsilon=blur for distances, or call cloud_loss(x, y, blur=...)",
    ),
    "reach": _Keyword(
        "GeomLoss", "marginal_penalty", "give marginal_penalty=2 * reach**2 for squared distances, "
        "marginal_penalty=reach for distances",
    ),
    **dict.fromkeys(
        ("reach_x", "reach_y"),
        _Keyword(
            "FlashSinkhorn", "marginal_penalty", "give marginal_penalty=(2 * reach_x**2, 2 * reach_y**2) for squared "
            "distances",
        ),
    ),
    "debias": _Keyword(
        "GeomLoss", None, 'leave it out: cloud_loss(kind="divergence") and sinkhorn_divergence are debiased, and '
        "sinkhorn(a, b, PointCost(x, y), epsilon=...) is not",
    ),
    "scaling": _Keyword("GeomLoss", "tolerance", "leave it out: iterations end at tolerance=..., the marginal error"),
    "diameter": _Keyword("GeomLoss", None, "leave it out: steps of epsilon follow the largest cost"),
    "truncate": _Keyword("GeomLoss", None, _LEAVE_OUT),
    "cluster_scale": _Keyword("GeomLoss", None, _LEAVE_OUT),
    "backend": _Keyword("GeomLoss", "impl", 'leave it out: impl="auto" takes the fastest'),
    "potentials": _Keyword("GeomLoss", None, "use solve(...).potentials"),
    "a": _Keyword("POT", "p", "the order is (p, q, cost): give p=a"),
    "b": _Keyword("POT", "q", "the order is (p, q, cost): give q=b"),
    "M": _Keyword("POT", "cost", "the order is (p, q, cost): give cost=M"),
    "reg": _Keyword("POT", "epsilon", "give epsilon=reg"),
    "reg_m": _Keyword("POT", "marginal_penalty", "give marginal_penalty=reg_m"),
    "unbalanced": _Keyword("POT", "marginal_penalty", "give marginal_penalty=..."),
    "m": _Keyword("POT", "mass", "give mass=m"),
    "numItermax": _Keyword("POT", "max_iterations", "give max_iterations=..."),
    "max_iter": _Keyword("POT", "max_iterations", "give max_iterations=..."),
    "stopThr": _Keyword("POT", "tolerance", "give tolerance=..., which is relative to the mass"),
    "tol": _Keyword("POT", "tolerance", "give tolerance=..., which is relative to the mass"),
    "method": _Keyword("POT", "impl", 'leave it out: impl="auto" takes the fastest'),
    "warmstart": _Keyword("POT", "start", "give start=(f, g), potentials in the unit of the cost"),
    "log": _Keyword("POT", None, "use solve(...), which has the plan, the potentials and the errors"),
    "seed": _Keyword("POT", "generator", "give generator=torch.Generator().manual_seed(seed)"),
    "random_state": _Keyword("scikit-learn", "generator", "give generator=torch.Generator().manual_seed(...)"),
    "threshold": _Keyword("OTT", "tolerance", "give tolerance=..., the marginal error"),
    **dict.fromkeys(
        ("tau_a", "tau_b"),
        _Keyword(
            "OTT", "marginal_penalty", "give marginal_penalty=epsilon * tau_a / (1 - tau_a), or a pair with that of "
            "tau_b; OTT's entropy is another one (docs/guide/coming_from/ott.md)",
        ),
    ),
    "numThreads": _Keyword("POT", None, "leave it out: torch.set_num_threads holds here too"),
    **dict.fromkeys(
        ("u_values", "v_values"),
        _Keyword(
            "scipy", "x", "weights stand first: wasserstein_1d(u_weights, v_weights, u_values, v_values), None for "
            "equal ones",
        ),
    ),
    "u_weights": _Keyword("scipy", "p", "give p=u_weights"),
    "v_weights": _Keyword("scipy", "q", "give q=v_weights"),
    "regularization_strength": _Keyword(
        "torchsort", "epsilon", 'give regularization="quadratic" for its "l2", with epsilon=regularization_strength * '
        "(n - 1) / (x.max() - x.min()) for ranks of n entries without outliers",
    ),
    "direction": _Keyword("fast-soft-sort", "descending", 'give descending=True for "DESCENDING"'),
    "verbose": _Keyword("POT and GeomLoss", None, _LEAVE_OUT),
    "weight": _Keyword("torch", "class_weight", "give class_weight=weight"),
    "label_smoothing": _Keyword(
        "torch", "target", "give soft labels as the target: otloss.losses.soft_labels(target, K, kind)"
    ),
    "reduction": _Keyword(
        "torch", None, "take .mean() or .sum() of the values, or a module, such as otloss.nn.CloudLoss(reduction=...)"
    ),
    "mode": _Keyword("EMOLoss", "weighting", 'leave it out for mode=1, and give weighting="transport" for mode=2'),
    "cost_embedding": _Keyword("EMOLoss", "embedding", "give embedding=cost_embedding"),
}  # fmt: skip
_SAMPLES_ON_A_CIRCLE = _Keyword(
    "POT", "x", "weights stand first: wasserstein_circular(u_weights, v_weights, u_values, v_values, period=1), None "
    "for equal ones",
)  # fmt: skip
_SAMPLES_OF_ENERGY_DISTANCE = _Keyword(
    "scipy", "x", "weights stand first, at shared values: (2 * cdf_distance(p, q, x)).sqrt() is energy_distance"
)
_POTENTIALS_OF_DIVERGENCE = _Keyword(
    "GeomLoss", None, "they are the gradients of the value in the weights: torch.autograd.grad(value, (a, b))"
)
_STRENGTH_OF_SORTING = _Keyword(
    "torchsort", "epsilon", 'give regularization="quadratic" for its "l2", with epsilon=regularization_strength * '
    "(x.max() - x.min()) / (n - 1) for n entries",
)  # fmt: skip
_OF_SORTING = {
    **dict.fromkeys(("dim", "axis"), _Keyword("torch", None, "rows lie along the last axis: give x.movedim(dim, -1)")),
    **dict.fromkeys(
        ("temperature", "tau"),
        _Keyword("softsort", "epsilon", "give epsilon=..., relative to the width of a row"),
    ),
    "largest": _Keyword("torch", None, "leave it out for largest=True, and give -x for False"),
    "sorted": _Keyword("torch", None, _LEAVE_OUT),
}
# Keywords that mean another thing in a function than in the others.
_KEYWORDS_OF = {
    "barycenter": {
        "A": _Keyword("POT", "p", "give p=A.T, histograms in rows"),
        "M": _Keyword("POT", "cost", "give cost=M.T, whose rows are the bins of the answer"),
    },
    "cdf_distance": dict.fromkeys(("u_values", "v_values"), _SAMPLES_OF_ENERGY_DISTANCE),
    "CloudLoss": {"potentials": _POTENTIALS_OF_DIVERGENCE},
    "cloud_loss": {"potentials": _POTENTIALS_OF_DIVERGENCE},
    "cloud_barycenter": {
        "reg": _Keyword("POT", "epsilon", "give epsilon=reg for the debiased one, unlike POT's"),
        "stopThr": _Keyword("POT", "tolerance", "give tolerance=..., of the last step"),
    },
    "fused_gromov": {
        "C1": _Keyword("POT", "C_x", "give C_x=C1"),
        "C2": _Keyword("POT", "C_y", "give C_y=C2"),
        "M": _Keyword("POT", "feature_cost", "give feature_cost=M"),
        **dict.fromkeys(
            ("tol", "tol_rel", "stopThr"),
            _Keyword("POT", "tolerance", "give tolerance=..., of the change of the value"),
        ),
    },
    "gradient_penalty": dict.fromkeys(
        ("lambda_gp", "lambda_", "lambda_term", "gp_weight", "weight"),
        _Keyword("WGAN-GP code", None, "multiply the value, usually by 10"),
    ),
    "match": {
        "maximize": _Keyword("scipy", None, "leave it out for maximize=False, and give match(-cost) for True"),
    },
    "pair": {"replace": _Keyword("TorchCFM", None, _LEAVE_OUT)},
    "sinkhorn_divergence": {"potentials": _POTENTIALS_OF_DIVERGENCE},
    "soft_rank": _OF_SORTING,
    "soft_sort": {**_OF_SORTING, "regularization_strength": _STRENGTH_OF_SORTING},
    "soft_top_k": _OF_SORTING,
    "wasserstein_circular": dict.fromkeys(("u_values", "v_values"), _SAMPLES_ON_A_CIRCLE),
}
_TREE_SETTINGS = (
    "alpha colsample_bylevel colsample_bynode colsample_bytree device gamma grow_policy "
    "interaction_constraints max_bin max_delta_step max_leaves min_child_samples min_child_weight "
    "min_split_gain monotone_constraints num_leaves reg_alpha reg_lambda subsample "
    "subsample_freq tree_method verbosity"
)
_LIGHTGBM_SETTINGS = (
    "bagging_fraction bagging_freq boosting feature_fraction lambda_l1 lambda_l2 min_data_in_leaf min_gain_to_split"
)
# Keywords of functions and classes that have booster_params.
_BOOSTER_KEYWORDS = {
    **dict.fromkeys(
        ("early_stopping_rounds", "early_stopping_round", "stopping_rounds"),
        _Keyword("XGBoost and LightGBM", "n_iter_no_change", "give n_iter_no_change=... and early_stopping=True"),
    ),
    **dict.fromkeys(
        ("num_boost_round", "num_iterations"),
        _Keyword("XGBoost and LightGBM", "n_estimators", "give n_estimators=..."),
    ),
    "eta": _Keyword("XGBoost", "learning_rate", "give learning_rate=..."),
    **dict.fromkeys(("nthread", "num_threads"), _Keyword("XGBoost and LightGBM", "n_jobs", "give n_jobs=...")),
    "seed": _Keyword("XGBoost and LightGBM", "random_state", "give random_state=..."),
    **dict.fromkeys(
        ("objective", "num_class", "eval_metric", "base_score"),
        _Keyword("XGBoost and LightGBM", "cost", "leave it out: it follows from power, cost, values and the labels"),
    ),
    "eval_set": _Keyword("XGBoost and LightGBM", None, "give it to fit"),
    "scale_pos_weight": _Keyword("XGBoost and LightGBM", "class_weight", "give class_weight=..."),
    "iterations": _Keyword("CatBoost", "n_estimators", "give n_estimators=..."),
    "cat_features": _Keyword("CatBoost", None, "give fit a DataFrame with columns of dtype category"),
    "callbacks": _Keyword("XGBoost and LightGBM", None, "train with otloss.boosting.xgboost_objective for them"),
    **{
        name: _Keyword(
            "XGBoost and LightGBM", "booster_params", f"give booster_params={{{name!r}: ...}} by the library's name"
        )
        for name in _TREE_SETTINGS.split()
    },
    **{
        name: _Keyword("LightGBM", "booster_params", f'give booster="lightgbm" and booster_params={{{name!r}: ...}}')
        for name in _LIGHTGBM_SETTINGS.split()
    },
}
_OWN_TRAINING = "train with otloss.boosting.xgboost_objective or lightgbm_objective for that"
# Keywords of a fit that has eval_set.
_FIT_KEYWORDS = {
    **dict.fromkeys(
        ("early_stopping_rounds", "stopping_rounds"),
        _Keyword("XGBoost and LightGBM", None, "set n_iter_no_change=... and early_stopping=True of the estimator"),
    ),
    **dict.fromkeys(
        ("sample_weight_eval_set", "eval_sample_weight", "eval_sample_weights"),
        _Keyword("XGBoost and LightGBM", None, "give eval_set=[(X, y, sample_weight), ...]"),
    ),
    "eval_metric": _Keyword(
        "XGBoost and LightGBM", None, "leave it out: it is the loss, by power, cost and values of the estimator"
    ),
    **dict.fromkeys(("verbose", "eval_names"), _Keyword("XGBoost and LightGBM", None, _LEAVE_OUT)),
    **dict.fromkeys(
        ("class_weight", "eval_class_weight"),
        _Keyword("LightGBM", None, "set class_weight=... of the estimator"),
    ),
    "categorical_feature": _Keyword("LightGBM", None, "give a DataFrame with columns of dtype category"),
    "feature_name": _Keyword("LightGBM", None, "give a DataFrame with these columns"),
    **dict.fromkeys(
        (
            "callbacks",
            "xgb_model",
            "init_model",
            "base_margin",
            "base_margin_eval_set",
            "init_score",
            "eval_init_score",
            "feature_weights",
        ),
        _Keyword("XGBoost and LightGBM", None, _OWN_TRAINING),
    ),
}
_CALLS = (
    _Call("POT", "emd2 emd2_lazy", "otloss.emd(p, q, cost)"),
    _Call("POT", "sinkhorn2", "otloss.solve(p, q, cost, epsilon=reg).linear_cost"),
    _Call("POT", "sinkhorn_log sinkhorn_stabilized sinkhorn_epsilon_scaling sinkhorn_knopp",
          "otloss.solve(p, q, cost, epsilon=reg).plan()"),
    _Call("POT", "solve_sample empirical_sinkhorn empirical_sinkhorn2",
          "otloss.solve(None, None, otloss.costs.PointCost(x, y), epsilon=...)"),
    _Call("POT", "empirical_sinkhorn_divergence",
          "otloss.cloud_loss(x, y, epsilon=...), whose values hold the entropy, which POT's leave out"),
    _Call("POT", "solve_batch solve_sample_batch",
          "otloss.solve(p, q, cost, epsilon=...), whose leading axes are batch"),
    _Call("POT", "emd_1d emd2_1d", "otloss.wasserstein_1d(p, q, x, y, order=2)"),
    _Call("POT", "wasserstein_circle binary_search_circle", "otloss.wasserstein_circular(p, q, x, y, period=1)"),
    _Call("POT", "sliced_wasserstein_distance", "otloss.sliced_wasserstein(x, y).sqrt()"),
    _Call("POT", "sinkhorn_unbalanced sinkhorn_knopp_unbalanced lbfgsb_unbalanced",
          "otloss.solve(p, q, cost, epsilon=reg, marginal_penalty=reg_m).plan()"),
    _Call("POT", "sinkhorn_unbalanced2", "otloss.solve(p, q, cost, epsilon=reg, marginal_penalty=reg_m).linear_cost"),
    _Call("POT", "partial_wasserstein partial_wasserstein2", "otloss.emd(p, q, cost, mass=m)"),
    _Call("POT", "entropic_partial_wasserstein",
          "otloss.solve(p, q, cost, epsilon=reg, mass=m), whose entropy, and so its plan, is another than POT's"),
    _Call("POT", "gromov_wasserstein gromov_wasserstein2 solve_gromov fused_gromov_wasserstein "
          "fused_gromov_wasserstein2",
          "otloss.fused_gromov(C1, C2, M, p, q, alpha=...)"),
    _Call("POT", "entropic_gromov_wasserstein entropic_gromov_wasserstein2 entropic_fused_gromov_wasserstein "
          "entropic_fused_gromov_wasserstein2", "otloss.fused_gromov(C1, C2, M, p, q, alpha=..., epsilon=...), "
          "whose value includes the entropy, unlike POT's"),
    _Call("POT", "barycenter_sinkhorn barycenter_debiased barycenter_stabilized",
          "otloss.barycenter(A.T, C.T, weights, epsilon=reg, debiased=...)"),
    _Call("POT", "convolutional_barycenter2d convolutional_barycenter2d_debiased",
          "otloss.barycenter(images.flatten(1), otloss.costs.GridCost(shape, spacing=1 / (n - 1)), epsilon=reg, "
          "debiased=...) for sides of n pixels"),
    _Call("POT", "free_support_barycenter", "otloss.cloud_barycenter(clouds, masses, weights, start=X_init)"),
    _Call("POT", "bures_wasserstein_distance", "otloss.bures_wasserstein(Cs, Ct, mean_p=ms, mean_q=mt).sqrt()"),
    _Call("POT", "dist dist_batch", "otloss.costs.PointCost(x, y)"),
    _Call("POT", "unif", "None, which stands for equal weights"),
    _Call("POT", "EMDTransport", 'otloss.estimators.TransportAdapter("barycentric")'),
    _Call("POT", "SinkhornTransport", 'otloss.estimators.TransportAdapter("barycentric", epsilon=reg_e)'),
    _Call("POT", "LinearTransport", "otloss.estimators.TransportAdapter()"),
    _Call("skada", "OTMapping OTMappingAdapter", 'otloss.estimators.TransportAdapter("barycentric")'),
    _Call("skada", "LinearOTMapping LinearOTMappingAdapter", "otloss.estimators.TransportAdapter()"),
    _Call("GeomLoss", "SamplesLoss", "otloss.cloud_loss(x, y, blur=...) or otloss.nn.CloudLoss"),
    _Call("GeomLoss", "ImagesBarycenter",
          "otloss.barycenter(images.flatten(1), otloss.costs.GridCost(shape, spacing=1 / n), epsilon=2 * blur**2, "
          "debiased=True) for sides of n pixels"),
    _Call("OTT", "PointCloud", "otloss.costs.PointCost(x, y)"),
    _Call("OTT", "Geometry", "otloss.costs.DenseCost(matrix)"),
    _Call("OTT", "Grid", "otloss.costs.GridCost(shape, spacing=1 / (n - 1)) for sides of n points"),
    _Call("OTT", "LinearProblem Sinkhorn LRSinkhorn", "otloss.solve(p, q, cost, epsilon=...) or otloss.nn.Sinkhorn"),
    _Call("OTT", "QuadraticProblem GromovWasserstein", "otloss.fused_gromov(C1, C2, M, p, q)"),
    _Call("OTT", "FixedBarycenter", "otloss.barycenter(p, cost, weights, epsilon=...)"),
    _Call("OTT", "sinkdiv", "otloss.sinkhorn_divergence(p, q, cost, epsilon=...) or otloss.cloud_loss(x, y)"),
    _Call("OTT", "wassdis_p", "otloss.cloud_loss(x, y, kind=\"emd\").sqrt() for p=2"),
    _Call("OTT", "hungarian", "otloss.match(cost)"),
    _Call("OTT", "uniform_distance quantile_distance north_west_distance",
          "otloss.wasserstein_1d(p, q, x, y, order=...)"),
    _Call("OTT", "ranks", "otloss.soft_rank(x, epsilon=...) - 1, with other numbers at the same epsilon"),
    _Call("OTT", "topk_mask", "otloss.soft_top_k(x, k, epsilon=...), with other numbers at the same epsilon"),
    _Call("scipy", "wasserstein_distance", "otloss.wasserstein_1d(None, None, u, v) for samples u, v"),
    _Call("scipy", "wasserstein_distance_nd",
          "otloss.emd(None, None, otloss.costs.PointCost(u, v, metric=\"euclidean\")) for samples u, v"),
    _Call("scipy", "energy_distance", "(2 * otloss.cdf_distance(p, q, x)).sqrt() for weights p, q at values x"),
    _Call("scipy", "linear_sum_assignment", "otloss.match(cost), or otloss.match(-cost) for maximize=True"),
    _Call("scipy", "min_weight_full_bipartite_matching", "otloss.match(cost), with +inf at pairs that must not be"),
    _Call("lap", "lapjv lapjvx lapjvc lapmod", "otloss.match(cost)"),
    _Call("DETR", "HungarianMatcher", "otloss.losses.set_loss, or otloss.match(cost)"),
    _Call("TorchCFM", "OTPlanSampler", "otloss.pair(x0, x1)"),
    _Call("gensim", "wmdistance WmdSimilarity", "otloss.losses.document_distance or otloss.document_search"),
    _Call("unifrac", "unifrac weighted_unnormalized weighted_unnormalized_fp64", "otloss.wasserstein_tree"),
    _Call("WGAN-GP code", "compute_gradient_penalty calc_gradient_penalty", "otloss.losses.gradient_penalty"),
    _Call("torchaudio", "frechet_distance", "otloss.bures_wasserstein(covariance_p, covariance_q, mean_p=, mean_q=)"),
    _Call("PyTorch3D", "chamfer_distance", "otloss.cloud_loss(x, y), which is transport, with other numbers"),
    _Call("ntloss", "NTLoss", "otloss.number_token_loss(logits, labels, values, form=\"wasserstein\")"),
    _Call("ntloss", "NTLossDotProduct", "otloss.number_token_loss(logits, labels, values, form=\"mse\")"),
    _Call("EMOLoss", "EMOLoss", "otloss_llm.emo_loss(logits[:, :-1], labels[:, 1:], embedding, directions=0)"),
    _Call("torchmetrics", "ContinuousRankedProbabilityScore continuous_ranked_probability_score", "otloss.losses.crps"),
    _Call("scoringrules", "crps_ensemble", "otloss.losses.crps(ensemble, observation)"),
    _Call("scoringrules", "rps_score", "otloss.metrics.ranked_probability_score"),
    _Call("coral-pytorch", "coral_loss CoralLoss", "otloss.losses.threshold_loss(head(features), target) with head = "
          "otloss.nn.CumulativeLinkHead(inputs, classes), and class positions in place of levels"),
    _Call("coral-pytorch", "CoralLayer", "otloss.nn.CumulativeLinkHead"),
    _Call("coral-pytorch", "corn_loss CornLoss", "otloss.nn.CornHead, and torch.nn.functional.nll_loss of what it "
          "returns, a mean over rows in place of binary tasks"),
    _Call("coral-pytorch", "corn_label_from_logits", "otloss.nn.CornHead and its predict(features)"),
    _Call("mord", "LogisticAT", 'otloss.estimators.CumulativeLinkClassifier(loss="all_threshold", cross_entropy=0, '
          "alpha=1.0, standardize=False)"),
    _Call("mord", "LogisticIT", 'otloss.estimators.CumulativeLinkClassifier(loss="immediate_threshold", '
          "cross_entropy=0, alpha=1.0, standardize=False)"),
    _Call("statsmodels", "OrderedModel", "otloss.estimators.CumulativeLinkClassifier(transport=0, cross_entropy=1, "
          'alpha=0, standardize=False, link="probit"), or link="logit" for distr="logit"'),
    _Call("dlordinal", "EMDLoss", "otloss.ordinal_loss(logits, target)"),
    _Call("spacecutter", "LogisticCumulativeLink OrdinalLogisticModel CumulativeLinkLoss cumulative_link_loss",
          "otloss.nn.CumulativeLinkHead, and torch.nn.functional.nll_loss of what it returns"),
    _Call("dlordinal", "CLM", "otloss.nn.CumulativeLinkHead"),
    _Call("dlordinal", "TriangularLoss BetaLoss BinomialLoss PoissonLoss",
          "otloss.losses.soft_labels of that kind, with other numbers, as targets of otloss.ordinal_loss"),
    _Call("dlordinal", "amae", "otloss.metrics.macro_mae"),
    _Call("dlordinal", "mmae", "otloss.metrics.maximum_mae"),
    _Call("dlordinal", "accuracy_off1", "otloss.metrics.off_by_one_accuracy"),
    _Call("skordinal", "POM", "otloss.estimators.CumulativeLinkClassifier(transport=0, cross_entropy=1)"),
    _Call("skordinal", "average_mean_absolute_error", "otloss.metrics.macro_mae"),
    _Call("skordinal", "maximum_mean_absolute_error", "otloss.metrics.maximum_mae"),
    _Call("skordinal", "accuracy_off1_score", "otloss.metrics.off_by_one_accuracy"),
)  # fmt: skip
# Names of submodules that are looked for in the package itself.
_OF_SUBMODULES = {
    "otloss.costs":
        "CosineCost Cost DenseCost GridCost LineCost PointCost as_cost cost_between costs_within graph_cost",
    "otloss.nn":
        "CdfDistance CloudLoss CornHead Crps CumulativeLinkHead DocumentDistance Emd HistogramLoss JdotLoss "
        "NgramDistance NumberTokenLoss OrdinalLoss SetLoss Sinkhorn SinkhornDivergence SlicedWasserstein "
        "SoftRank SoftSort SoftTopK ThresholdLoss Wasserstein1d WassersteinCircular WassersteinTree",
    "otloss.losses":
        "critic_loss crps cumulative_log_probabilities decode_classes document_distance generator_loss "
        "gradient_penalty histogram_labels histogram_mean jdot_loss ngram_distance set_loss soft_labels "
        "threshold_loss",
    "otloss.estimators":
        "CumulativeLinkClassifier EncodedLabelsWarning EnsembleRecalibration LabelOrderWarning LikelihoodSummary "
        "OrdinalBoostingClassifier OrdinalClassifier OrdinalDecomposition OrdinalNetworkClassifier "
        "OrdinalRecalibration Temperature TransportAdapter",
    "otloss.boosting":
        "lightgbm_metric lightgbm_objective start_scores xgboost_metric xgboost_objective",
    "otloss_llm":
        "EAFT EMO EmbeddingCost ExpectedValue GEM LabelSmoothing MLE MixCE MixedCost NumberCost NumberSettings "
        "NumberToken NumberTokens ObjectiveMixin ObjectiveTrainer Power RatingCost ShardedEmbeddingCost TaiLr "
        "TokenLoss ZLoss all_but_the_top dense_token_loss emo_loss linear_token_loss parse_objective token_loss "
        "token_statistics",
    "otloss_llm.evaluation":
        "DistributionScores NumberDistribution Perplexity context_length decode_numbers number_distributions "
        "perplexity score_number_distributions",
    "otloss.metrics":
        "Distribution OrdinalScorer Reliability macro_mae maximum_mae minimum_sensitivity off_by_one_accuracy "
        "ordinal_emd ordinal_mae pit_histogram ranked_probability_score scorer threshold_calibration_error "
        "threshold_reliability",
}  # fmt: skip
_LATER = ("estimators", "metrics", "plotting")  # submodules that `import otloss` does not load
# The exponent of POT's functions on a line; `p` are the weights here.
_EXPONENT = _Keyword("POT", "order", "give order= for the exponent")


def explain_missing_names(module: str, own: Iterable[str]) -> None:
    """Let a module raise errors that say what to call in place of a name of another package.

    The module has a `__getattr__` from here: for type checkers, a module that defines this function has every name.
    """

    def raise_for(name: str) -> NoReturn:
        raise missing_name(module, name, own)

    vars(sys.modules[module])["__getattr__"] = raise_for


def missing_name(module: str, name: str, own: Iterable[str]) -> AttributeError:
    """Return what the `__getattr__` of a module is to raise; Python does not show it for `from module import name`."""
    advice = next((f", which is {c.library}'s; use {c.ours}" for c in _CALLS if name in c.names.split()), "")
    homes = [home for home, names in _OF_SUBMODULES.items() if name in names.split()]
    if module.startswith("otloss_llm") and name in vars(sys.modules["otloss"]).get("__all__", ()):
        homes = ["otloss"]
    if not advice and homes:
        advice = f"; use {homes[0]}.{name}"
    if name in _LATER:
        advice = f"; write import {module}.{name} first"
    for submodule in _LATER:
        # What needs a submodule that is not the one at hand, nor loaded with it.
        if f"otloss.{submodule}." in advice and module == "otloss":
            advice += f", after import otloss.{submodule}"
    if not advice and not name.startswith("_"):
        words = [other for other in own if sorted(other.split("_")) == sorted(name.split("_"))]
        if near := words or difflib.get_close_matches(name, own, n=1, cutoff=0.75):
            advice = f"; did you mean {near[0]}?"
    return AttributeError(f"module {module!r} has no attribute {name!r}{advice}", name=name)


def check_call(function: str, own: Mapping[str, Any], args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    """Raise a TypeError that says what to write if a function of the parameters `own` does not take this call."""
    check_keywords(function, settings, own)
    positional = [name for name, parameter in own.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    if len(args) > len(positional):
        extra, options = args[len(positional) :], [n for n in own if n not in positional]
        while isinstance(extra[0], int | float) and options and isinstance(own[options[0]].default, str):
            options.pop(0)  # a number is not meant for an option of words, as `kind`
        raise TypeError(_TOO_MANY.get(function) or _too_many(function, extra, positional, options))
    if "order" in own and "p" in positional and isinstance(settings.get("p"), int | float):
        raise TypeError(f"{function} got p={settings['p']}, a number, and p are weights here; {_EXPONENT.advice}.")


def check_keywords(function: str, keywords: Iterable[str], own: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword of another package that is not among the function's own, or nearly one of those."""
    table = _BOOSTER_KEYWORDS if "booster_params" in own else _FIT_KEYWORDS if "eval_set" in own else _KEYWORDS
    table = table | _KEYWORDS_OF.get(function, {})
    for name in keywords:
        if name in own:
            continue
        if name == "p" and "order" in own:
            raise TypeError(_message(function, name, _EXPONENT, own))
        if name in table:
            raise TypeError(_message(function, name, table[name], own))
        if near := difflib.get_close_matches(name, own, n=1):
            raise TypeError(f"{function} has no option {name!r}; did you mean {near[0]}=?")


_WITHOUT_VALUES = ("match", "solve", "barycenter", "fused_gromov")  # what they return is no value per problem alone
_OF_SOLVE = ("emd", "sinkhorn", "Emd", "Sinkhorn")  # whose plans `solve` has


def _message(function: str, name: str, keyword: _Keyword, own: Mapping[str, Any]) -> str:
    is_without = (name == "reduction" and function in _WITHOUT_VALUES) or (name == "log" and function not in _OF_SOLVE)
    advice = _LEAVE_OUT if is_without else keyword.advice
    if keyword.ours is not None and keyword.ours not in own:
        advice = f"leave it out, or use a function that has {keyword.ours}= (docs/guide/coming_from.md has a table)"
    return f"{function} has no option {name!r}, which is {keyword.library}'s; {advice}."


# Calls with more arguments than a function takes that are meant for another function.
_TOO_MANY = {
    "match": "match takes one argument, the costs, such as match(torch.cdist(x, y)) between two clouds; for pairs of "
    "two clouds that are drawn by an optimal plan, call pair(x, y).",
}


def _too_many(function: str, extra: tuple[Any, ...], positional: list[str], options: list[str]) -> str:
    matches = [
        f"{name}={value!r}" if isinstance(value, int | float | str) else f"{name}=..."
        for name, value in zip(options, extra, strict=False)
    ]
    advice = f"give options by name: {', '.join(matches)}" if matches else "leave out the others"
    return (
        f"{function} takes {len(positional)} argument{'s' * (len(positional) != 1)} without a name, "
        f"{', '.join(positional)}, and got {len(positional) + len(extra)}; {advice}."
    )
