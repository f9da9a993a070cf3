"""Tables of checkpoint names: one function that knows what parameters a decoder may have, given how a family calls them."""

from __future__ import annotations

from jaxllm.weights.rules import Rule, Source, rule
from jaxllm.weights.transforms import COPY, FUSE_Q, FUSE_QKV, INTERLEAVE, TOKEN_ROWS, FuseHeads, Transform


def decoder_rules(
    *,
    decoder: str = "model.",
    layer: str = "layers.{i}.",
    embed: str = "embed_tokens",
    positions: str | None = None,
    embed_norm: str | None = None,
    attention_norm: str = "input_layernorm",
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    fuse: FuseHeads = FUSE_QKV,
    q_norm: str = "self_attn.q_norm",
    k_norm: str = "self_attn.k_norm",
    head_norms: Transform = COPY,
    out: str = "self_attn.o_proj",
    attention_post_norm: str | None = None,
    cross: tuple[str, ...] | None = None,
    cross_norm: str | None = None,
    mlp_norm: str = "post_attention_layernorm",
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj"),
    up: str = "mlp.up_proj",
    down: str = "mlp.down_proj",
    mlp_post_norm: str | None = None,
    final_norm: str = "norm",
    head: str = "lm_head",
    transposed: bool = False,
) -> tuple[Rule, ...]:
    """The rules of a family, from its names; the defaults are Llama's. A model uses those of the parameters that it has.

    Args:
        decoder: what every name but the head's begins with.
        layer: what the names of layer i begin with after that.
        qkv: three names, or one where the checkpoint fuses them as `fuse` says.
        head_norms: how the weights of `q_norm` and `k_norm` are kept.
        cross: projections of attention to an encoder: queries, keys, values and output.
        gate_up: two names, or one where the checkpoint fuses them.
        up: of feed-forwards without a gate.
        transposed: whether projections of layers are kept as [in, out].
    """
    at = decoder + layer
    gates = [Source(f"{at}{name}.") for name in gate_up]
    if len(gates) == 1:
        gates = [Source(gates[0].name, part=part, parts=2) for part in range(2)]

    def linear(param: str, *sources: str | Source, weight: Transform = COPY, bias: Transform = COPY) -> tuple[Rule, ...]:
        parts = [s if isinstance(s, Source) else Source(f"{at}{s}.") for s in sources]
        weights = [Source(s.name + "weight", transposed, s.part, s.parts) for s in parts]
        biases = [Source(s.name + "bias", False, s.part, s.parts) for s in parts]
        return rule(f"layers.{{i}}.{param}", *weights, transform=weight), rule(f"layers.{{i}}.{param}_bias", *biases, transform=bias)

    def norm(param: str, source: str | None, transform: Transform = COPY) -> tuple[Rule, ...]:
        if source is None:
            return ()
        return tuple(rule(f"{param}.{part}", f"{source}.{part}", transform=transform) for part in ("weight", "bias"))

    def layer_norm(param: str, source: str | None, transform: Transform = COPY) -> tuple[Rule, ...]:
        return norm(f"layers.{{i}}.{param}", None if source is None else at + source, transform)

    of_cross: tuple[Rule, ...] = ()
    if cross is not None:
        of_cross = (
            *linear("cross.q", cross[0], weight=FUSE_Q, bias=FUSE_Q),
            *linear("cross.kv", *cross[1:3], weight=INTERLEAVE, bias=INTERLEAVE),
            *linear("cross.out", cross[3]),
            *layer_norm("cross_norm", cross_norm),
            *layer_norm("cross_post_norm", cross_norm),
        )
    return (
        rule("embed.weight", f"{decoder}{embed}.weight", transform=TOKEN_ROWS),
        *(() if positions is None else (rule("embed.positions", f"{decoder}{positions}.weight"),)),
        *norm("embed.norm", None if embed_norm is None else decoder + embed_norm),
        *layer_norm("attention_norm", attention_norm),
        *linear("attention.qkv", *qkv, weight=fuse, bias=fuse),
        *layer_norm("attention.q_norm", q_norm, head_norms),
        *layer_norm("attention.k_norm", k_norm, head_norms),
        *linear("attention.out", out),
        *layer_norm("attention_post_norm", attention_post_norm),
        *of_cross,
        *layer_norm("mlp_norm", mlp_norm),
        *linear("mlp.gate_up", *gates, weight=INTERLEAVE, bias=INTERLEAVE),
        *linear("mlp.up", up),
        *linear("mlp.down", down),
        *layer_norm("mlp_post_norm", mlp_post_norm),
        *norm("final_norm", decoder + final_norm),
        rule("head.weight", f"{head}.weight", transform=TOKEN_ROWS),
        rule("head_bias", f"{head}.bias", transform=TOKEN_ROWS),
    )
