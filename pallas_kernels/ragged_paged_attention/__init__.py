"""Ragged paged attention: `reference.py` is the oracle, `tpu.py` the kernel of the same signature and cache layout (`layout.py`)."""
