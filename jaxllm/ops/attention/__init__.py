"""Ragged paged attention: one contract, one backend a platform.

    attend(q, k, v, cache, metadata, spec, sinks, bias) -> (out, cache)

writes the new keys and values of a step into their pages and attends over everything that each query may see, prompt chunks and decodes
in one call. `sinks` [H] are scores that take part in each softmax and have no value (None: none), `bias` is what `position_bias` adds
to scores (None: nothing). Attention that is not causal sees everything that is kept of a row: the whole input of an encoder.
`reference.py` is the plain oracle of the same signature; `xla.py` runs on every platform, `tpu.py` and `gpu.py` run kernels.
"""

from jaxllm.ops.attention.backend import AttentionBackend, choose_backend
from jaxllm.ops.attention.metadata import AttentionMetadata, Cache, LayerCache

__all__ = ["AttentionBackend", "AttentionMetadata", "Cache", "LayerCache", "choose_backend"]
