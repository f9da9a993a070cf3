"""Anthropic's Messages API, as a translation to and from the answering of conversations."""
