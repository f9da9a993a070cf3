"""Four made-up CPU devices for tensor parallel tests, and one compilation cache for the whole run: equal programs compile once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


# Compilation is what takes time in these tests: half of what it takes with these left alone.
COMPILED_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):
    COMPILED_QUICKLY["xla_cpu_use_fusion_emitters"] = False  # newer ones have no others


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Programs of the module are compiled with little optimisation."""
    compile_quickly = functools.partialmethod(jax.stages.Lowered.compile, compiler_options=COMPILED_QUICKLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_quickly)
        yield
