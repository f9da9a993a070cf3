"""The OpenAI-compatible HTTP server. Imports no jax."""
