"""
EMO in a TRL script
===================

EMO adds to the likelihood the cost of transporting the model's distribution over the next token to the right token,
where similar tokens are near. In a script of TRL it is one class and one argument. The model and the text are made up
here, so that the script runs offline in seconds: put your own in their place.
"""

import tempfile
import warnings

import matplotlib.pyplot as plt
import torch
from datasets import Dataset, disable_progress_bars
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from otloss_llm import ObjectiveMixin
from otloss_llm.data import train_bpe_tokenizer

warnings.filterwarnings("ignore", category=FutureWarning)  # of the libraries among themselves
disable_progress_bars()
logging.disable_progress_bar()
logging.set_verbosity_error()
torch.manual_seed(0)
texts = [f"{a} plus {b} is {a + b}." for a in range(20) for b in range(20)]
tokenizer = train_bpe_tokenizer(texts, 300)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


# %%
# The change to the script: this class, and the argument `objective`.


class EMOTrainer(ObjectiveMixin, SFTTrainer):
    """TRL's trainer with the objectives of otloss."""


folder = tempfile.TemporaryDirectory()
args = SFTConfig(
    folder.name, max_steps=60, learning_rate=3e-3, use_cpu=True, logging_steps=5, report_to=[], save_strategy="no",
    disable_tqdm=True, seed=0,
)  # fmt: skip
trainer = EMOTrainer(
    LlamaForCausalLM(config), args, objective="emo", train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)  # fmt: skip
trainer.remove_callback(PrinterCallback)
result = trainer.train()
folder.cleanup()

# %%
# The log has the likelihood and the transport cost beside the loss, so that runs of different objectives can be
# compared by the same numbers.

rows = [row for row in trainer.state.log_history if "nll" in row]
for row in (rows[0], rows[-1]):
    print({name: round(float(row[name]), 3) for name in ("step", "loss", "nll", "transport_cost")})

figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for axis, (name, label) in zip(
    axes, {"nll": "nll (nats per token)", "transport_cost": "transport cost D (0 to 2)"}.items(), strict=True
):
    axis.plot([row["step"] for row in rows], [row[name] for row in rows], color="C0")
    axis.set(xlabel="steps", ylabel=label)
figure.suptitle("EMO lowers both")
