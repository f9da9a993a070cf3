"""Which attention serves which platform, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest

from jaxllm.errors import ConfigError
from jaxllm.ops.attention import AttentionMetadata, LayerCache, choose_backend, gpu
from jaxllm.specs import AttendSpec, CacheLayer

LAYER = CacheLayer(num_kv_heads=2, head_dim=64, attend=AttendSpec(0.125))


def test_each_platform_has_its_backend_and_layout():
    cpu, tpu = choose_backend("cpu"), choose_backend("tpu", "TPU v6 lite")
    assert (cpu.name, tpu.name) == ("xla", "tpu")
    assert isinstance(cpu.cache_shapes(5, 8, LAYER, jnp.float32), LayerCache)
    words = tpu.cache_shapes(5, 128, LAYER, jnp.dtype(jnp.bfloat16))
    assert (words.shape, words.dtype) == ((5, 2, 128, 128), jnp.uint32)


@pytest.mark.parametrize(
    ("kind", "has_kernel"),
    [
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA RTX PRO 6000", False),
        ("NVIDIA B200", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
    ],
)
def test_hopper_and_b200_have_a_kernel_where_jax_is_new_enough(kind, has_kernel):
    assert choose_backend("gpu", kind).name == ("gpu" if has_kernel and jax.__version_info__ >= (0, 11) else "xla")


def test_a_gpu_without_a_kernel_is_said_once(caplog):
    gpu.say_once.cache_clear()
    for _ in range(2):
        choose_backend("gpu", "NVIDIA A100-SXM4-80GB")
    assert [r.message for r in caplog.records] == [
        "attention runs through XLA: the kernels for GPUs are made for Hopper and B200, and this is NVIDIA A100-SXM4-80GB"
    ]


def test_layers_that_the_kernel_does_not_know_run_on_xla(caplog):
    tpu = choose_backend("tpu", "TPU v6 lite")
    for attend in (AttendSpec(0.125, window=16, chunked=True), AttendSpec(0.125, alibi=(0.5,) * 4)):
        assert isinstance(tpu.cache_shapes(5, 128, CacheLayer(2, 64, attend), jnp.dtype(jnp.bfloat16)), LayerCache)
    assert "no TPU kernel for" in caplog.text


def test_a_latent_lies_in_one_page_on_tpus(caplog):
    tpu = choose_backend("tpu", "TPU v6 lite")
    pages = tpu.cache_shapes(5, 128, CacheLayer(1, 576, AttendSpec(0.1, latent=512)), jnp.dtype(jnp.bfloat16))
    assert (pages.shape, pages.dtype) == ((5, 1, 128, 640), jnp.bfloat16)  # whole lanes
    assert not caplog.text


def test_a_latent_without_a_kernel_on_hopper_is_said_once(caplog):
    gpu.say_once.cache_clear()
    if jax.__version_info__ < (0, 11):
        pytest.skip("this jax has an older Mosaic GPU")
    backend = choose_backend("gpu", "NVIDIA H200")
    layer = CacheLayer(1, 20, AttendSpec(0.1, latent=16))
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), backend.cache_shapes(2, 64, layer, jnp.dtype(jnp.bfloat16)))
    one = jnp.array([1])
    metadata = AttentionMetadata(one[None], jnp.array([0, 1]), one, jnp.array([0]), jnp.array([0]), jnp.int32(1))
    out, _ = backend.attend_shard(jnp.ones((1, 4, 20)), jnp.ones((1, 1, 20)), None, cache, metadata, layer.attend, None, None)
    assert out.shape == (1, 4, 16)
    assert "attention runs through XLA: attention in float32" in caplog.text


def test_float16_and_odd_pages_are_refused_on_tpus():
    tpu = choose_backend("tpu", "TPU v6 lite")
    with pytest.raises(ConfigError, match=r"bfloat16, float32, .* are"):
        tpu.cache_shapes(5, 128, LAYER, jnp.dtype(jnp.float16))
    with pytest.raises(ConfigError, match="multiples of 8"):
        tpu.cache_shapes(5, 20, LAYER, jnp.dtype(jnp.bfloat16))
