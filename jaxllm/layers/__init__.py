"""Flax NNX modules that the shared decoder is built from. New mathematics is a new layer here."""
