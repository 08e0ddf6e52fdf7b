"""Training with any objective: the trainer, fused scoring, and runs that resume."""
