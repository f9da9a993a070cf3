"""What a family file provides, and the readings of a config that several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.errors import ModelLoadError
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import Activation, AttentionSpec, BlockSpec, DecoderSpec, RopeSpec
from jaxllm.weights.rules import Rule

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its name in `architectures` of config.json.
        to_spec: config, and the longest sequence of the engine (None: the config's own), to the decoder's spec.
        rules: for every parameter that a member may have.
        prefix: what checkpoint names of the decoder begin with.
        ignored: patterns of checkpoint tensors that carry nothing; `{sharing}` stands for the layers that read another's keys and
            values, `{past}` for the first ones after the last.
        renamed: (pattern, replacement) of beginnings of checkpoint names that have several spellings.
        harmless_keys: of the config, that change nothing for this architecture.
        encoder_rules: of the encoder's own parameters, where there is one.
        float16: whether activations stay within float16's range.
    """

    architecture: str
    to_spec: Callable[[HFConfig, int | None], DecoderSpec]
    rules: tuple[Rule, ...]
    prefix: str
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    harmless_keys: tuple[str, ...] = ()
    encoder_rules: tuple[Rule, ...] = ()
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
    return heads, kv_heads, config.size("head_dim", width // heads)


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


def change_blocks(spec: DecoderSpec, change: Callable[[int, BlockSpec], BlockSpec]) -> DecoderSpec:
    """The spec with each block (its index, it) changed."""
    return replace(spec, blocks=tuple(change(i, block) for i, block in enumerate(spec.blocks)))


def change_attention(spec: DecoderSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> DecoderSpec:
    """The spec with the attention of each block (its index, it) changed."""

    def change_mixer(i: int, block: BlockSpec) -> BlockSpec:
        return replace(block, mixer=change(i, block.mixer)) if isinstance(block.mixer, AttentionSpec) else block

    return change_blocks(spec, change_mixer)


def change_attend(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    """The spec with `fields` of every layer's `AttendSpec` changed."""
    return change_attention(spec, lambda i, mixer: replace(mixer, attend=replace(mixer.attend, **fields)))


def with_windows(spec: DecoderSpec, windows: Sequence[int | None], rope: RopeSpec | None) -> DecoderSpec:
    """The spec with the attention window of each layer (None: full attention), and the rope of those that have one."""

    def change(i: int, mixer: AttentionSpec) -> AttentionSpec:
        if windows[i] is None:
            return mixer
        return replace(mixer, attend=replace(mixer.attend, window=windows[i]), rope=rope)

    return change_attention(spec, change)


def only_rotated(spec: DecoderSpec, rotated: Sequence[object]) -> DecoderSpec:
    """The spec without rotation in layers where `rotated` says no."""
    return change_attention(spec, lambda i, mixer: mixer if rotated[i] else replace(mixer, rope=None))


# Vision and audio parts of a checkpoint, and the spellings of its text part.
TEXT_HALF_IGNORED = (r"(model\.)?(vision|audio|multi_modal|embed_vision|embed_audio)\w*\..*",)
TEXT_HALF_RENAMED = ((r"(model\.language_model|language_model\.model)\.", "model."), (r"language_model\.lm_head\.", "lm_head."))


def text_half(family: Family, architecture: str, defaults: Mapping[str, Any], harmless: Sequence[str]) -> Family:
    """The family of a multimodal `architecture` whose `text_config` is one of `family`: it serves text.

    Args:
        defaults: what the text config may leave out.
        harmless: keys of the outer config that do not concern text.
    """

    def spec(config: HFConfig, max_model_len: int | None) -> DecoderSpec:
        tied = {} if config.get("tie_word_embeddings") is None else {"tie_word_embeddings": config.get("tie_word_embeddings")}
        text = HFConfig({**defaults, **config.get("text_config", {}), **tied})
        decoder = family.to_spec(text, max_model_len)
        text.refuse_unread(architecture, family.harmless_keys)
        return decoder

    return replace(
        family,
        architecture=architecture,
        to_spec=spec,
        ignored=(*family.ignored, *TEXT_HALF_IGNORED),
        renamed=TEXT_HALF_RENAMED,
        harmless_keys=("vision_config", "audio_config", *harmless),
    )
