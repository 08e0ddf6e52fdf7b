"""Whether an objective may take the place of a model's own loss.

It may if that loss is the cross-entropy of the labels at their positions, and the term that balances experts, which an
objective keeps. The decoders of BART, Pegasus, TrOCR and others score label t at position t, which nothing in their
configs says; their loss shows it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import set_seed

from otloss_llm.losses.positions import IGNORE_INDEX
from otloss_llm.models.heads import base_model
from otloss_llm.training.fused import auxiliary_loss
from otloss_llm.training.sample import Sample, output_logits, token_mask
from otloss_llm.training.trainer_settings import auxiliary_weight


def check_own_loss(sample: Sample, *, shifted_by_user: bool) -> None:
    """Raise ValueError unless the model's own loss is the cross-entropy and the terms that an objective keeps.

    Loss and logits are of one pass, so dropout does not matter. Nothing is checked where there is nothing to label.
    """
    base = base_model(sample.root)
    if not _takes_labels(base):
        return
    labels = sample.labels if sample.is_encoder_decoder else _own_labels(sample)
    output, logits = _own_output(sample, labels)
    if output.get("loss") is None:
        return
    _check_logits(sample, labels, logits)
    unshifted = _mean_nll(logits, labels)
    nll = unshifted if sample.is_encoder_decoder else _mean_nll(logits[:, :-1], labels[:, 1:])
    if math.isnan(nll):
        return
    term, rounding = _experts_term(sample.root, output)
    tolerance = (1e-5 if output["loss"].dtype == torch.float32 else 2.0**-6) * nll + rounding
    own = float(output["loss"]) - term
    if abs(own - nll) <= tolerance:
        return
    if not abs(own - unshifted) <= tolerance:
        _raise_unknown_term(sample.root, output, nll + term)
    if not shifted_by_user:
        raise ValueError(
            f"the loss of {type(base).__name__} scores label t at position t, other causal language models score it at "
            "t - 1, so it is unclear what the labels are. Name them shift_labels, with the token that position t "
            "predicts at t (and set remove_unused_columns=False)."
        )


def _takes_labels(base: Any) -> bool:
    parameters = inspect.signature(base.forward).parameters
    return "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _own_labels(sample: Sample) -> Tensor:
    """Return labels at the positions of their tokens, as models take them; all tokens where none is labelled."""
    labels = nn.functional.pad(sample.labels[:, :-1], (1, 0), value=IGNORE_INDEX)
    ids = sample.inputs.get("input_ids")
    if ids is None or (labels != IGNORE_INDEX).any():
        return labels
    return sample.known_labels(ids.masked_fill(~token_mask(sample.inputs, sample.labels).to(ids.device), IGNORE_INDEX))


def _own_output(sample: Sample, labels: Tensor) -> tuple[Any, Tensor]:
    """Return the model's output for labels, as a dict, and its logits: of a second pass if the first makes none."""
    set_seed(0)
    output = sample.model(**sample.inputs, labels=labels.clone())
    if not isinstance(output, dict):  # return_dict=False
        output = {"loss": output[0], "logits": output[1]} if output[0].ndim == 0 else {"logits": output[0]}
    return output, _unlabelled_logits(sample) if output.get("logits") is None else output_logits(output)


def _unlabelled_logits(sample: Sample) -> Tensor:
    """Return the logits without labels, with the dropout of other passes."""
    set_seed(0)
    return sample.logits(sample.whole_inputs)


def _mean_nll(logits: Tensor, labels: Tensor) -> float:
    """Return the cross-entropy, in float32, of the labelled positions alone; NaN if there are none."""
    labelled = labels != IGNORE_INDEX
    return float(cross_entropy(logits[labelled.to(logits.device)].float(), labels[labelled].to(logits.device)))


def _experts_term(root: nn.Module, output: Any) -> tuple[float, float]:
    """Return what a model adds to its loss to balance its experts, and the rounding error of this.

    The weight is the model's own: a trainer may have another one, which the model does not know.
    """
    experts = auxiliary_loss(output)
    if experts is None:
        return 0.0, 0.0
    term = float(auxiliary_weight(None, root) * experts)
    return term, abs(term) * (1e-5 if experts.dtype == torch.float32 else 2.0**-8)


def _check_logits(sample: Sample, labels: Tensor, logits: Tensor) -> None:
    """Raise ValueError if logits depend on labels: by a decoder's inputs that are not ours, or in another way."""
    labelled = (labels != IGNORE_INDEX).to(logits.device)
    unlabelled = _unlabelled_logits(sample)[labelled]
    if _agree(unlabelled, logits[labelled]):
        return
    if sample.model.training and not _agree(unlabelled, _unlabelled_logits(sample)[labelled]):
        return  # draws of its own, which no seed repeats
    if sample.is_encoder_decoder:
        raise ValueError(
            f"{sample.name} makes the inputs of its decoder from labels in a way that is not known; "
            "put decoder_input_ids into the batch, with the token before label t at position t."
        )
    raise ValueError(
        f"the logits of {sample.name} are others when it gets labels, and an objective gives it none; make its forward "
        "independent of labels, except for its loss."
    )


def _agree(a: Tensor, b: Tensor) -> bool:
    """Return whether logits of the same tokens and draws are equal, up to the order of sums on a GPU; or NaN."""
    if not len(b) or b.isnan().any():
        return True
    tolerance = 1e-5 if torch.finfo(b.dtype).bits >= 32 else 2.0**-6
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.abs().max())


def _raise_unknown_term(root: Any, output: Any, expected: float) -> None:
    base = base_model(root)
    names = [name for name in output if name.endswith(("aux_loss", "z_loss")) and name != "aux_loss"]
    advice = "switch it off in the model's config, or add it in a compute_loss of your trainer, which calls super()"
    if names:
        advice = f"({', '.join(names)}) set model.config.output_router_logits = False"
    elif getattr(base, "z_loss_coefficient", 0):
        advice = "set model.z_loss_coefficient = 0 and give the trainer z_loss=, whose mean is over labelled tokens"
    elif getattr(getattr(root, "active_peft_config", None), "orth_reg_weight", 0):
        advice = (
            "use another adapter than AdaLoRA, whose orthogonality term (orth_reg_weight) cannot be 0, such as LoRA"
        )
    raise ValueError(
        f"the loss of {type(base).__name__} is {float(output['loss']):.6g} where its cross-entropy and the loss of its "
        f"experts are {expected:.6g}: it has a term that an objective would leave out. To train without it, {advice}."
    )
