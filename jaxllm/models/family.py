"""What a family file provides, and the readings of a config that several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.errors import ModelLoadError
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import DecoderSpec
from jaxllm.weights.rules import Rule

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its name in `architectures` of config.json.
        to_spec: config, and the longest sequence of the engine (None: the config's own), to the decoder's spec.
        rules: for every parameter that a member may have.
        prefix: what checkpoint names of the decoder begin with.
        ignored: patterns of checkpoint tensors that carry nothing.
        harmless_keys: of the config, that change nothing for this architecture.
        float16: whether activations stay within float16's range.
    """

    architecture: str
    to_spec: Callable[[HFConfig, int | None], DecoderSpec]
    rules: tuple[Rule, ...]
    prefix: str
    ignored: tuple[str, ...] = ()
    harmless_keys: tuple[str, ...] = ()
    float16: bool = True


def head_sizes(config: HFConfig) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim); absent KV heads are as many as query heads, an absent head dim is width / heads.

    Raises:
        ModelLoadError: sizes that do not divide.
    """
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}")
    if config.get("head_dim") is None and width % heads:
        raise ModelLoadError(f"config.json: hidden_size={width} must be a multiple of num_attention_heads={heads}")
    head_dim = config.size("head_dim", width // heads)
    if head_dim % 2:
        raise ModelLoadError(f"config.json: rotary embeddings need an even head_dim, got {head_dim}")
    return heads, kv_heads, head_dim


def layer_windows(config: HFConfig, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
    """The attention window of each layer, None for full attention.

    Args:
        config: its `layer_types` decides where present.
        window: positions that a windowed layer sees.
        default: layer index -> whether it is windowed, where the config has no `layer_types`.

    Raises:
        ModelLoadError: a layer type that is not supported, a list of another length, a windowed layer without a window.
    """
    num_layers = config.size("num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        return [window if default(i) else None for i in range(num_layers)]
    if len(types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
    unknown = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"config.json: layer_types has {', '.join(unknown)}; supported: full_attention, sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ModelLoadError("config.json: layer_types has sliding_attention, but no sliding_window is in force")
    return [window if kind == "sliding_attention" else None for kind in types]
