"""
EMO in a TRL script, with LoRA
==============================

EMO adds to the likelihood the cost of transporting the model's distribution over the next token to the right token,
where similar tokens are near. In a script of TRL it is one class and one argument, also with LoRA. The model and the
text are made up here, so that the script runs offline in seconds: put your own in their place.
"""

import tempfile
import warnings

import matplotlib.pyplot as plt
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from otloss_llm import ObjectiveMixin
from otloss_llm.data import train_bpe_tokenizer

warnings.filterwarnings("ignore")  # the libraries warn about each other
disable_progress_bars()
logging.disable_progress_bar()
logging.set_verbosity_error()
torch.manual_seed(0)
sums = [f"{a} plus {b} is {a + b}." for a in range(20) for b in range(20)]
products = [f"{a} times {b} is {a * b}." for a in range(20) for b in range(20)]
tokenizer = train_bpe_tokenizer(sums + products, 320)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


# %%
# The change to the script: this class, and the argument `objective`.


class EMOTrainer(ObjectiveMixin, SFTTrainer):
    """TRL's trainer with the objectives of otloss."""


def train(model, texts, objective, **settings):
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=60, use_cpu=True, logging_steps=5, report_to=[], save_strategy="no", disable_tqdm=True,
            seed=0, learning_rate=3e-3,
        )  # fmt: skip
        trainer = EMOTrainer(
            model, args, objective=objective, train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer, **settings,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model, [row for row in trainer.state.log_history if "nll" in row]


# %%
# A base model learns sums by likelihood. It is then fine-tuned on products by EMO, with adapters of rank 8 on all
# linear layers; the weights of the base model stay as they are.

base, first = train(LlamaForCausalLM(config), sums, "mle")
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
tuned, second = train(base, products, "emo", peft_config=lora)
trained = sum(weight.numel() for weight in tuned.parameters() if weight.requires_grad)
print(f"{trained:,} of {sum(weight.numel() for weight in tuned.parameters()):,} weights were trained")

# %%
# The log has the likelihood and the transport cost beside the loss, so that runs of different objectives can be
# compared by the same numbers.

for row in (second[0], second[-1]):
    print({name: round(float(row[name]), 3) for name in ("step", "loss", "nll", "transport_cost")})

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
labels = {"nll": "nll (nats per token)", "transport_cost": "transport cost D (0 to 2)"}
for axis, (name, label) in zip(axes, labels.items(), strict=True):
    axis.plot([row["step"] for row in second], [row[name] for row in second], color="C0")
    axis.set(xlabel="steps of fine-tuning", ylabel=label)
figure.suptitle("EMO lowers both")
