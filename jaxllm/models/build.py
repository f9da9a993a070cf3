"""From a config to a `ModelDef`: the abstract model that memory planning, loading and the compiled step share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.errors import ConfigError
from jaxllm.models.decoder import Decoder
from jaxllm.models.family import Family
from jaxllm.models.hf_config import HFConfig
from jaxllm.models.registry import find_family
from jaxllm.specs import BlockSpec, CacheLayer, DecoderSpec, MLASpec, StateLayer
from jaxllm.weights.rules import LoadPlan, bind_rules
from jaxllm.weights.transforms import CheckpointDims

# What names of the encoder's parameters begin with.
_ENCODER = "encoder."


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
        cache_layers: what each layer keeps, replicas of KV heads counted; without layers that read the cache of another.
    """

    architecture: str
    spec: DecoderSpec
    names: tuple[str, ...]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    axes: Mapping[str, tuple[str | None, ...]]
    rules: LoadPlan
    cache_layers: tuple[CacheLayer | StateLayer, ...]
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

    def bind(self, params: Sequence[jax.Array]) -> Any:
        """The module (a `Decoder`) over `params`, in the order of `names`. Cheap only while tracing: call it inside `jax.jit`."""
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
    spec = shard(logical, tensor_parallel_size)

    module = abstract(lambda: Decoder(spec, dtype))
    rules = _load_plan(family, logical, spec, module["shapes"])
    return ModelDef(architecture=family.architecture, spec=spec, rules=rules, cache_layers=spec.cache_layers, **module)


def _load_plan(family: Family, logical: DecoderSpec, spec: DecoderSpec, shapes: Mapping[str, Any]) -> LoadPlan:
    own = {name: shape for name, shape in shapes.items() if not name.startswith(_ENCODER)}
    options: dict[str, Any] = {"prefix": family.prefix, "ignored": ignored_names(family, spec), "renamed": family.renamed}
    plan = bind_rules(family.rules, own, checkpoint_dims(logical, spec), **options)
    if logical.encoder is None or spec.encoder is None:
        return plan
    of_encoder = {name.removeprefix(_ENCODER): shape for name, shape in shapes.items() if name not in own}
    bound = bind_rules(family.encoder_rules, of_encoder, checkpoint_dims(logical.encoder, spec.encoder), prefix=family.prefix)
    return dataclasses.replace(plan, recipes={**plan.recipes, **{_ENCODER + name: recipe for name, recipe in bound.recipes.items()}})


def abstract(build: Callable[[], nnx.Module], prefix: str = "") -> dict[str, Any]:
    """What a `ModelDef` knows of the module that `build` makes; `prefix` is taken off the names of its parameters."""
    graph, state = nnx.split(nnx.eval_shape(build))
    variables = {".".join(map(str, path)).removeprefix(prefix): (path, variable) for path, variable in nnx.to_flat_state(state)}
    return {
        "names": tuple(variables),
        "shapes": {name: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype) for name, (_, v) in variables.items()},
        "axes": {name: v.get_metadata("axes") for name, (_, v) in variables.items()},
        "_graph": graph,
        "_variables": tuple(variables.values()),
    }


def checkpoint_dims(logical: DecoderSpec, spec: DecoderSpec) -> list[CheckpointDims]:
    """The checkpoint's sizes for each layer, from the spec as the config says it and as devices share it."""
    return [_dims(logical.vocab_size, *blocks) for blocks in zip(logical.blocks, spec.blocks, strict=True)]


def _dims(vocab_size: int, logical: BlockSpec, block: BlockSpec) -> CheckpointDims:
    if isinstance(logical.mixer, MLASpec):
        return CheckpointDims(vocab_size, num_kv_heads=1, key_rows=logical.mixer.nope_dim, value_rows=logical.mixer.value_dim)
    kv_heads = logical.mixer.num_kv_heads if logical.mixer else 0
    if logical.recurrent is None or block.recurrent is None:
        return CheckpointDims(vocab_size, kv_heads)
    return CheckpointDims(vocab_size, kv_heads, logical.recurrent.num_groups, block.recurrent.rows)


def ignored_names(family: Family, spec: DecoderSpec) -> tuple[str, ...]:
    """Patterns of tensors that carry nothing for this member of the family."""
    sharing = "|".join(str(i) for i, block in enumerate(spec.blocks) if block.mixer and block.mixer.cache is None)
    past = "|".join(str(len(spec.blocks) + i) for i in range(4))
    patterns = (pattern for pattern in family.ignored if sharing or "{sharing}" not in pattern)
    return tuple(pattern.replace("{sharing}", sharing).replace("{past}", past) for pattern in patterns)


def shard(spec: DecoderSpec, shards: int) -> DecoderSpec:
    """The spec with sizes that `shards` devices can share equally.

    Raises:
        ConfigError: there is none; the message says which numbers of devices work.
    """
    parts = dict.fromkeys(part for block in spec.blocks for part in block.parts)
    if not all(part.divides(shards) for part in parts):
        working = [str(n) for n in range(1, spec.width + 1) if all(part.divides(n) for part in parts)]
        sizes = dict.fromkeys(part.sizes for part in parts)
        raise ConfigError(
            f"tensor_parallel_size={shards} does not divide this model ({', '.join(sizes)}); sizes that work: {', '.join(working)}"
        )
    blocks = tuple(
        dataclasses.replace(
            block,
            mixer=block.mixer and block.mixer.sharded(shards),
            recurrent=block.recurrent and block.recurrent.sharded(shards),
            cross=block.cross and block.cross.sharded(shards),
            feed_forward=block.feed_forward and block.feed_forward.sharded(shards),
        )
        for block in spec.blocks
    )
    padded = -(-spec.vocab_size // shards) * shards
    return dataclasses.replace(spec, blocks=blocks, padded_vocab_size=padded, encoder=spec.encoder and shard(spec.encoder, shards))
