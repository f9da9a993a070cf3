"""Products of rows with the matrix of their group: `gpu.py`; elsewhere `jax.lax.ragged_dot`, which is the reference too, is as good."""
