"""Token losses of a causal language model, public as `otloss_llm.token_loss`, `linear_token_loss` and so on."""
