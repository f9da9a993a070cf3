"""The `jaxllm` command. Imports no jax."""
