"""The device mesh, and how logical axes lie on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import ConfigError
from jaxllm.specs import CacheLayer, StateLayer
from jaxllm.weights.transforms import ALIGNMENT, empty

MESH_AXES = ("data", "expert", "model")


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axis of each logical axis (None: every device holds all of it)."""

    vocab: str | None = "model"
    embed: str | None = None
    heads: str | None = "model"
    kv_heads: str | None = "model"
    experts: str | None = "expert"
    mlp: str | None = "model"
    rows: str | None = "model"

    def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array whose axes have these logical names."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """A mesh of the first `tensor_parallel_size` devices. On CPU that many devices are made up.

    Raises:
        ConfigError: there are fewer devices.
    """
    if tensor_parallel_size > 1:
        _make_cpu_devices(tensor_parallel_size)
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size}, but this host has {len(devices)} {devices[0].platform} device(s);"
            f" at most {len(devices)} works"
        )
    shape = (1, 1, tensor_parallel_size)
    return Mesh(np.array(devices[:tensor_parallel_size]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _make_cpu_devices(count: int) -> None:
    """Let the CPU appear as `count` devices; no other platform takes notice."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started already: it keeps the devices it has, and make_mesh counts them
        return


@dataclass(frozen=True)
class Placement:
    """A mesh with its rules: where every array of the engine lies."""

    mesh: Mesh
    rules: ShardingRules = ShardingRules()

    @property
    def num_shards(self) -> int:
        return self.mesh.shape["model"]

    def sharding(self, axes: tuple[str | None, ...] = ()) -> NamedSharding:
        """The sharding of an array with these logical axes; none of them: replicated."""
        return NamedSharding(self.mesh, self.rules.partition(axes))

    def cache(self, layer: CacheLayer | StateLayer) -> NamedSharding:
        """Pages [N, K, ...] are split by KV head (or the like of states), unless they hold a latent that all heads share."""
        return self.sharding((None, "kv_heads") if isinstance(layer, StateLayer) or layer.is_split else ())

    def put(self, array: Any, axes: tuple[str | None, ...] = ()) -> jax.Array:
        """Place a host array, or what gives its slices when asked (`weights.rules.Stack`); each device gets its own slice only."""
        sharding = self.sharding(axes)
        if self.mesh.size > 1:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        whole = np.asarray(array)
        if self.mesh.devices.flat[0].platform == "cpu" and whole.ctypes.data % ALIGNMENT:
            # XLA would copy it as well, some time later, and keep the checkpoint's pages until then.
            array, whole = whole, empty(whole.shape, whole.dtype)
            whole[...] = array
        return jax.device_put(whole, sharding)
