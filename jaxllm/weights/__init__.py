"""Checkpoints to parameters: Hugging Face safetensors, GGUF files, and where to find them."""
