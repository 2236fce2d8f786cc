"""Environments. Nothing here imports JAX: worker processes must stay small and never touch an accelerator."""
