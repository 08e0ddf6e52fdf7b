"""Decoders whose own loss does not shift labels, and models that change their weights in eval mode."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from otloss_llm import ObjectiveTrainer
from otloss_llm.data.blocks import PackedBlocks
from otloss_llm.models.heads import shifts_labels
from otloss_llm.training.batches import pad_rows
from tests.otloss_llm.tiny_models import ONE_OF_EACH_KIND, VOCAB, tiny_model
from tests.otloss_llm.training.trainer_cases import (
    WARNINGS,
    Row,
    arguments,
    assert_same_weights,
    logs,
    rows,
    trainer,
    weights,
)

pytestmark = WARNINGS

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
UNSHIFTED = {"TrOCR": _DECODER, "Bart": _DECODER, "Pegasus": _DECODER}


def decoder(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**UNSHIFTED[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", [*UNSHIFTED, *ONE_OF_EACH_KIND])
def test_a_loss_that_shifts_its_labels_is_known(name: str) -> None:
    assert shifts_labels(decoder(name) if name in UNSHIFTED else tiny_model(name)) == (name not in UNSHIFTED)


def shifted(key: str) -> Any:
    """A collator whose labels are the tokens that positions predict, under this name."""

    def collate(data: list[Row]) -> dict[str, Tensor]:
        batch = pad_rows(data)
        labels = nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        return batch | {key: labels}

    return collate


def test_shifted_labels_are_scored_as_by_the_model_itself(tmp_path: Path) -> None:
    model = decoder("TrOCR")
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    settings: dict[str, Any] = {"train_dataset": rows(24), "eval_dataset": rows(11, seed=1)}
    args = arguments(tmp_path, optim="sgd")
    plain = transformers.Trainer(theirs, args, data_collator=shifted("labels"), **settings)
    run = ObjectiveTrainer(ours, args, objective="mle", data_collator=shifted("shift_labels"), **settings)
    plain.train(), run.train()
    assert logs(run, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-5)
    assert_same_weights(ours, theirs, 1e-5)
    assert run.evaluate()["eval_nll"] > 0


def test_labels_that_are_unclear_raise(tmp_path: Path) -> None:
    run = trainer(tmp_path, decoder("TrOCR"), objective="mle")
    for work in (run.train, run.evaluate):
        with pytest.raises(ValueError, match=r"loss of TrOCRForCausalLM scores label t at position t.*shift_labels"):
            work()


def test_rows_of_ours_are_never_ambiguous(tmp_path: Path) -> None:
    model = decoder("TrOCR").eval()
    ids = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    run = ObjectiveTrainer(model, arguments(tmp_path), objective="mle", eval_dataset=PackedBlocks(ids.int()))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert run.evaluate()["eval_nll"] == pytest.approx(float(expected), rel=1e-5)


def test_rwkv_keeps_its_weights(tmp_path: Path) -> None:
    """In eval mode RWKV divides the weights of deep layers in place; what is saved then would be another model."""
    torch.manual_seed(0)
    config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=4, rescale_every=2)
    model = transformers.RwkvForCausalLM(config)
    before = weights(model)
    run = trainer(tmp_path, model, objective="emo")
    for done in ("built", "evaluated"):
        for name, weight in weights(model).items():
            assert torch.equal(weight, before[name]), (done, name)
        run.evaluate()
