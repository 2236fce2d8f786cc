"""covsero_jax: CovGPO and SERO for LLM agents.

Empty on purpose: environment workers import `covsero_jax.envs` and must not pull in JAX.
"""
