"""What the losses need to know of a causal language model: its output head, and what it does to its logits."""
