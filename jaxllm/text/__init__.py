"""Text at the edge: tokenizers and chat templates. The engine itself speaks token ids only. Imports no jax."""
