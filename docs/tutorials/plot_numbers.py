"""
Numbers that a language model answers, by the median
====================================================

A language model that answers with a number has a distribution over numbers, of which generation shows one draw or the
most likely one. The median of the whole distribution is nearer to the truth on average, whatever the model was trained
with. `number_distributions` reads the distribution, and `decode_numbers` its median.
"""

import tempfile

import matplotlib.pyplot as plt
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainingArguments
from transformers.utils import logging

from otloss_llm import ObjectiveTrainer
from otloss_llm.evaluation import number_distributions

logging.set_verbosity_error()
logging.disable_progress_bar()
names = ["end", "after", "comes", *map(str, range(100))]
words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="end"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="end", unk_token="end")

# %%
# The task: the answer is the number of the prompt with noise, whose standard deviation is 8. A small Llama learns it
# from 1,000 rows by likelihood alone.

random = np.random.default_rng(0)
numbers = random.integers(0, 100, 1300)
answers = (numbers + 8 * random.standard_normal(1300)).round().clip(0, 99).astype(int)
prompts = [f"after {number} comes" for number in numbers]
rows = []
for prompt, answer in zip(prompts[:1000], answers, strict=False):
    asked, told = tokenizer(prompt)["input_ids"], tokenizer(f"{answer} end")["input_ids"]
    rows.append({"input_ids": asked + told, "labels": [-100] * len(asked) + told})

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
))  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, max_steps=300, per_device_train_batch_size=32, learning_rate=2e-3, lr_scheduler_type="cosine",
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = ObjectiveTrainer(model, args, objective="mle", train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()

# %%
# Three answers to 300 new prompts: the most likely number, the mean and the median of the distribution. Nothing was
# trained for them.

predicted = number_distributions(model, tokenizer, prompts[1000:], longest=1)
truth = answers[1000:]
decided = {
    "most likely": np.array([float(one.values[one.probabilities.argmax()]) for one in predicted]),
    "mean": np.array([one.decode("mean") for one in predicted]),
    "median": np.array([one.decode("median") for one in predicted]),
}
for name, values in decided.items():
    print(f"{name}: {abs(values - truth).mean():.2f} off on average")

# %%
# The first figure has the distribution of one prompt over the number line. It has several peaks, and the highest is not
# the best answer. The second has all answers beside the truth.

widest = int(np.argmax(abs(decided["most likely"] - decided["median"])))
figure, axis = plt.subplots(figsize=(9, 2.8), layout="constrained")
axis.bar(predicted[widest].values, predicted[widest].probabilities, color="0.7")
styles = {"most likely": ("C1", "--"), "median": ("C0", "-")}
for name, (colour, style) in styles.items():
    axis.axvline(decided[name][widest], color=colour, linestyle=style, label=name)
axis.axvline(numbers[1000 + widest], color="black", linestyle=":", label="number of the prompt")
axis.set(title=f"Forecast for the prompt {prompts[1000 + widest]!r}", xlabel="number", ylabel="probability")
axis.legend(frameon=False)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharex=True, sharey=True)
for axis, name in zip(axes, styles, strict=True):
    axis.plot([0, 99], [0, 99], color="0.7", lw=1)
    axis.scatter(truth, decided[name], s=8, color=styles[name][0])
    axis.set(title=f"{name}: {abs(decided[name] - truth).mean():.1f} off", xlabel="right answer", aspect="equal")
axes[0].set_ylabel("answer")
