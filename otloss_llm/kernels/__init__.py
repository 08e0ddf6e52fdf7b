"""Kernels of the token loss: `reference` is the specification, `chunked` never forms the full logits."""
