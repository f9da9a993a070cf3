"""What families with experts share: the names of their tensors, and the keys that say which layers have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from jaxllm.models.family import ACTIVATIONS, change_blocks
from jaxllm.models.hf_config import HFConfig
from jaxllm.specs import DecoderSpec, MLPSpec, MoESpec
from jaxllm.weights.rules import Rule, Source, rule
from jaxllm.weights.transforms import COPY, INTERLEAVE, TRANSPOSE, InterleaveInputs, Transform

# Layers after the last, which predict tokens further ahead.
MTP_LAYERS = r"model\.layers\.({past})\..*"
# They change how routers are trained.
TRAINING_KEYS = (
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size",
)  # fmt: skip


def first_size(config: HFConfig, *keys: str) -> int:
    """The size under the first of `keys` that is there; transformers has written several."""
    return config.size(next((key for key in keys if config.get(key) is not None), keys[0]))


def expert_mlp(config: HFConfig, width: int) -> MLPSpec:
    """An expert of `width` with the config's activation."""
    return MLPSpec(width, config.choice("hidden_act", ACTIVATIONS, "silu"))


def with_experts(spec: DecoderSpec, moe: MoESpec, in_layer: Callable[[int], bool] = lambda layer: True) -> DecoderSpec:
    """The spec with experts in the layers where `in_layer` says so."""
    return change_blocks(spec, lambda i, block: replace(block, feed_forward=moe) if in_layer(i) else block)


def sparse_layers(config: HFConfig) -> Callable[[int], bool]:
    """Qwen's choice of layers: each `decoder_sparse_step`-th but those of `mlp_only_layers`."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def expert_rules(
    *,
    at: str = "model.layers.{i}.mlp.",
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    correction_as: Transform = COPY,
    each: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
    layout: Literal["halves", "transposed", "alternating"] = "halves",
    shared: str | None = None,
    shared_gate: str | None = None,
) -> tuple[Rule, ...]:
    """The rules of a feed-forward of experts.

    Args:
        at: what the names begin with.
        each: gate, up and down of an expert that has tensors of its own, `experts.{e}.NAME.weight`; without the first where not gated.
        stacked: gate and up, and down, of all experts in one tensor.
        layout: how these keep gate and up: as halves [E, 2F, M], as [E, M, 2F], or so with columns that take turns.
        shared: the beginning of the shared expert's names.
        shared_gate: of the projection that gates it.
    """
    transposed, strided = layout != "halves", layout == "alternating"
    parts = len(each) - 1
    both = [Source(at + stacked[0], transposed, part, parts, strided, stacked=True) for part in range(parts)]
    biases = [replace(source, name=f"{source.name}_bias", transposed=False) for source in both]
    own = [f"{at}experts.{{e}}.{name}.weight" for name in each]
    rules = [
        rule("router", f"{at}{router}.weight"),
        rule("router_bias", f"{at}{router}.bias"),
        rule("correction", at + correction, transform=correction_as),
        rule("experts.gate_up", *own[:-1], transform=InterleaveInputs(parts)),
        rule("experts.gate_up", *both, transform=InterleaveInputs(parts)),
        rule("experts.gate_up_bias", *biases, transform=INTERLEAVE),
        rule("experts.down", own[-1], transform=TRANSPOSE),
        rule("experts.down", Source(at + stacked[1], transposed, stacked=True), transform=TRANSPOSE),
        rule("experts.down_bias", Source(f"{at}{stacked[1]}_bias", stacked=True)),
    ]
    if shared is not None:
        gate_up = [f"{at}{shared}.{name}_proj.weight" for name in ("gate", "up")]
        rules += [rule("shared.gate_up", *gate_up, transform=INTERLEAVE), rule("shared.up", gate_up[1])]
        rules.append(rule("shared.down", f"{at}{shared}.down_proj.weight"))
    if shared_gate is not None:
        rules.append(rule("shared_gate", f"{at}{shared_gate}.weight"))
    return tuple(replace(r, param=f"layers.{{i}}.mlp.{r.param}") for r in rules)
