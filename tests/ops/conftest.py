"""Four made-up CPU devices for the sharding tests."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 4)
