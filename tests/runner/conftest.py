"""Four made-up CPU devices for tensor parallel tests, and one compilation cache for the whole run: equal programs compile once."""

from __future__ import annotations

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
