"""How keys and values lie in pages of 32-bit words: [N, W, S, L], for N pages of S positions.

A word of a 16-bit cache holds a key element in its low half and the value element of the same head, position and dimension in its high
half (W = K KV heads); a 32-bit cache alternates key heads and value heads (W = 2K). So does an 8-bit one, whose words hold four consecutive
positions, the first in the lowest byte: its pages are [N, W, S / 4, L]. L is the head dim padded to whole lanes of 128.

Why words: sub-lane tiles of 8 x 128 words are full whatever the number of heads (a 16-bit [.., K, D] array pads one head to 16), a single
transfer brings keys and values, and 32-bit rows can be addressed one by one. Heads come before positions: the keys of one head are then
consecutive tiles, ready for the matrix unit, and pages split over devices along W.

A latent (one key head whose first dims are the value as well) has nothing to be packed with, and positions fill its tiles: it lies in its
own dtype, [N, 1, S, L].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8
DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


# From words [.., R, L] to rows [.., 4R, L] of 8-bit elements, and back; jitted, since it does not run by itself.
bitcast = jax.jit(pltpu.bitcast, static_argnums=1)


class UnsupportedShapeError(ValueError):
    """A shape or dtype that the kernel cannot run; the message says which one would do."""


def padded_head_dim(head_dim: int) -> int:
    """L of the layout: whole lanes."""
    return -(-head_dim // LANES) * LANES


def tile_rows(itemsize: int) -> int:
    """Positions of a tile, for elements (or words) of so many bytes."""
    return SUBLANES * 4 // itemsize


def cache_shape(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, *, latent: bool = False
) -> jax.ShapeDtypeStruct:
    """The abstract array of one layer's pages.

    Raises:
        UnsupportedShapeError: a dtype that the matrix unit does not take, or pages that are not whole tiles.
    """
    dtype = jnp.dtype(dtype)
    supported = DTYPES[:2] if latent else DTYPES
    if dtype.name not in supported:
        raise UnsupportedShapeError(f"keys and values of {dtype.name} are not supported by the TPU kernel; {', '.join(supported)} are")
    packing = positions_per_word(dtype)
    unit = tile_rows(dtype.itemsize) if latent else SUBLANES * packing
    if page_size % unit:
        raise UnsupportedShapeError(f"pages of {page_size} positions are not whole tiles of a TPU; multiples of {unit} are (128 is best)")
    if latent:
        return jax.ShapeDtypeStruct((num_pages, 1, page_size, padded_head_dim(head_dim)), dtype)
    words = num_kv_heads if dtype.itemsize == 2 else 2 * num_kv_heads
    word = jnp.float32 if dtype.itemsize == 4 else jnp.uint32
    return jax.ShapeDtypeStruct((num_pages, words, page_size // packing, padded_head_dim(head_dim)), word)


def positions_per_word(dtype: jnp.dtype) -> int:
    """Positions of a cache of `dtype` that share a word."""
    return 4 if jnp.dtype(dtype).itemsize == 1 else 1


def pack(k: jax.Array, v: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """k, v [T, K, D] as words [T, W, L] of a cache of `dtype`; without v, k is a latent. An element of 8 bits has a word for itself here,
    with its sign extended.

    What is not finite becomes zero: masked positions have weight zero, and zero times NaN would carry one request's overflow into others.
    """
    padding = ((0, 0), (0, 0), (0, padded_head_dim(k.shape[-1]) - k.shape[-1]))

    def finite(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.where(jnp.isfinite(x), x, 0).astype(dtype), padding)

    if v is None:
        return finite(k)
    k, v = finite(k), finite(v)
    if jnp.dtype(dtype).itemsize == 2:
        low, high = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (k, v))
        return low | (high << 16)
    both = jnp.stack((k, v), axis=2).reshape(k.shape[0], -1, k.shape[-1])
    if positions_per_word(dtype) == 1:
        return both
    return lax.bitcast_convert_type(lax.bitcast_convert_type(both, jnp.int8).astype(jnp.int32), jnp.uint32)


def store(cache: jax.Array, words: jax.Array, page: jax.Array, offset: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Put words [T, W, L] of `pack` at positions `offset` of pages `page` [T]."""
    if positions_per_word(dtype) == 1:
        return cache.at[page, :, offset].set(words)
    elements = bitcast(cache, jnp.int8)
    return bitcast(elements.at[page, :, offset].set(words.astype(jnp.int8)), jnp.uint32)


def unpack(words: jax.Array, dtype: jnp.dtype, *, latent: bool = False) -> tuple[jax.Array, jax.Array]:
    """Words [..., W, S, L] of a cache of `dtype` to keys and values [..., K, S, L] in float32, exactly; a latent is both."""
    if latent:
        return (words.astype(jnp.float32),) * 2
    if jnp.dtype(dtype).itemsize == 2:
        return split_word(words)
    elements = words if words.dtype == dtype else bitcast(words, dtype).astype(jnp.float32)
    return elements[..., 0::2, :, :], elements[..., 1::2, :, :]


def split_word(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values in float32 of uint32 words: bfloat16 is the upper half of float32."""
    return lax.bitcast_convert_type(words << 16, jnp.float32), lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)


def bytes_between(begin: jax.Array, end: jax.Array) -> jax.Array:
    """Masks of bytes [begin, end) of uint32 words; what is out of [0, 4] counts as the nearer of both."""

    def below(byte: jax.Array) -> jax.Array:
        return jnp.where(byte >= 4, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (8 * jnp.clip(byte, 0, 3)).astype(jnp.uint32)) - 1)

    return below(end) & ~below(begin)
