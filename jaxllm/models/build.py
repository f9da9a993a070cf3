"""From a config to a `ModelDef`: the abstract model that memory planning, loading and the compiled step share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.errors import ConfigError
from jaxllm.models.decoder import Decoder
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.registry import find_family
from jaxllm.specs import AttentionSpec, BlockSpec, CacheLayer, DecoderSpec
from jaxllm.weights.rules import LoadPlan, bind_rules
from jaxllm.weights.transforms import CheckpointDims


@dataclasses.dataclass(frozen=True, eq=False)
class ModelDef:
    """A model without its weights.

    Attributes:
        architecture: name in the registry.
        spec: the decoder, with sizes as they are on the devices (KV heads replicated, vocabulary padded).
        names: flat parameter paths, in the order of layers.
        shapes: abstract parameters by name.
        axes: logical axis names by parameter name, one an axis.
        rules: how a checkpoint becomes the parameters.
        cache_layers: what each layer keeps, replicas of KV heads counted.
    """

    architecture: str
    spec: DecoderSpec
    names: tuple[str, ...]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    axes: Mapping[str, tuple[str | None, ...]]
    rules: LoadPlan
    cache_layers: tuple[CacheLayer, ...]
    _graph: Any
    _variables: tuple[tuple[tuple[Any, ...], nnx.Param], ...]

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the config is made for, in tokens."""
        return self.spec.max_positions

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def num_params(self) -> int:
        """Elements of all parameters as stored on the devices."""
        return sum(math.prod(abstract.shape) for abstract in self.shapes.values())

    def bind(self, params: Sequence[jax.Array]) -> Decoder:
        """The decoder over `params`, in the order of `names`. Cheap only while tracing: call it inside `jax.jit`."""
        flat = [(path, variable.replace(value)) for (path, variable), value in zip(self._variables, params, strict=True)]
        return nnx.merge(self._graph, nnx.from_flat_state(flat))


def define_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    num_layers: int | None = None,
) -> ModelDef:
    """Build the abstract model of a config; takes no memory for weights.

    Args:
        hf_config: config.json, overrides applied.
        dtype: of the parameters and activations.
        tensor_parallel_size: shards that each layer is cut into. KV heads are replicated where there are fewer of them.
        max_model_len: the longest sequence of the engine; matters for rope scalings that depend on it (`models/rope.py`).
        num_layers: only this many first layers, for programs that show what the others do, too; None: all.

    Raises:
        ModelLoadError: an unsupported architecture, or a config that is not fully understood.
        ConfigError: a dtype or a number of shards that the model cannot have.
    """
    family = find_family(hf_config)
    if jnp.dtype(dtype) == jnp.float16 and not family.float16:
        raise ConfigError(f"dtype float16: activations of {family.architecture} pass its range; use bfloat16 or float32")
    config = HFConfig(hf_config)
    logical = family.to_spec(config, max_model_len)
    config.refuse_unread(family.architecture, family.harmless_keys)
    logical = dataclasses.replace(logical, blocks=logical.blocks[:num_layers])
    spec = _shard(logical, tensor_parallel_size)

    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, dtype)))
    variables = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}
    shapes = {name: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype) for name, (_, v) in variables.items()}
    dims = [CheckpointDims(vocab_size=logical.vocab_size, num_kv_heads=block.mixer.num_kv_heads) for block in logical.blocks]
    return ModelDef(
        architecture=family.architecture,
        spec=spec,
        names=tuple(shapes),
        shapes=shapes,
        axes={name: v.get_metadata("axes") for name, (_, v) in variables.items()},
        rules=bind_rules(family.rules, shapes, dims, prefix=family.prefix, ignored=family.ignored),
        cache_layers=tuple(block.mixer.cache for block in spec.blocks),
        _graph=graph,
        _variables=tuple(variables.values()),
    )


def _shard(spec: DecoderSpec, shards: int) -> DecoderSpec:
    """The spec with sizes that `shards` devices can share equally."""
    for block in spec.blocks:
        _check_divides(block, shards)
    blocks = tuple(_shard_block(block, shards) for block in spec.blocks)
    padded = -(-spec.vocab_size // shards) * shards
    return dataclasses.replace(spec, blocks=blocks, padded_vocab_size=padded)


def _shard_block(block: BlockSpec, shards: int) -> BlockSpec:
    mixer = dataclasses.replace(block.mixer, num_kv_heads=max(block.mixer.num_kv_heads, shards))
    return dataclasses.replace(block, mixer=mixer, feed_forward=dataclasses.replace(block.feed_forward, groups=shards))


def _check_divides(block: BlockSpec, shards: int) -> None:
    if _divides(block.mixer, block.feed_forward.width, shards):
        return
    heads, kv_heads, width = block.mixer.num_heads, block.mixer.num_kv_heads, block.feed_forward.width
    sizes = [str(n) for n in range(1, heads + 1) if _divides(block.mixer, width, n)]
    raise ConfigError(
        f"tensor_parallel_size={shards} does not divide this model ({heads} attention heads, {kv_heads} KV heads, MLP width {width});"
        f" sizes that work: {', '.join(sizes)}"
    )


def _divides(mixer: AttentionSpec, width: int, shards: int) -> bool:
    kv_heads = mixer.num_kv_heads
    return mixer.num_heads % shards == 0 and (kv_heads % shards == 0 or shards % kv_heads == 0) and width % shards == 0
