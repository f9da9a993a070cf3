"""Which GPUs run the kernels of `pallas_kernels`, which are Mosaic GPU; attention, experts and quantized products all ask here."""

from __future__ import annotations

import re

import jax

from pallas_kernels.devices import is_blackwell

# Older versions of jax have another Mosaic GPU.
_JAX_VERSION = (0, 11)


def reason_against(device_kind: str) -> str | None:
    """Why kernels cannot run on GPUs that jax calls `device_kind`, or None: they need wgmma or tcgen05."""
    if re.search(r"\bG?H(20|100|200|800)\b", device_kind) is None and not is_blackwell(device_kind):
        return f"the kernels for GPUs are made for Hopper and B200, and this is {device_kind or 'another GPU'}"
    if jax.__version_info__ < _JAX_VERSION:
        return f"the kernels for GPUs need jax {'.'.join(map(str, _JAX_VERSION))} or newer, and this is {jax.__version__}"
    return None
