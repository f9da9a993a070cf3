"""Model families: each maps a Hugging Face config to specs and checkpoint names to parameter paths."""
