"""Requests to pooling models: what they may hold, how they run, and what is answered."""
