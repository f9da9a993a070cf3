"""Products of rows with the matrix of their group. `jax.lax.ragged_dot` is the reference, and as good on TPUs; `jaxllm/ops/moe.py` says
what runs where.
"""
