"""Write docs/models.md from the tests: every architecture, what it is made of, and how far it is from its reference.

    python scripts/model_table.py

Runs the golden cases of every architecture (a minute or two on CPU).
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.models.build import define_model
from jaxllm.models.registry import FAMILIES
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec
from jaxllm.weights.rules import load_params
from tests.checkpoints import MemoryCheckpoint
from tests.dense import run_dense
from tests.golden.case import Case, load_golden
from tests.golden.cases import CASES
from tests.golden.test_relatives import RELATIVES
from tests.runner import test_encoder_decoder, test_golden_engine

PAGED = (*test_golden_engine.ENGINE_CASES, *test_encoder_decoder.ENGINE_CASES)
TABLE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
INTRODUCTION = """# Models

Made by `scripts/model_table.py` from the tests; do not edit.

The error is the largest difference of a log-probability from transformers' in float32, over all golden cases of the architecture. Every
architecture is also run over two devices (tensor parallelism) and must give the same; those marked *pages* run through the whole
engine as well: prompts in chunks, decoding from pages. *As another* means that transformers has no such model of its own, or that only
the text half of a multimodal one is served: the weights of the named relative in its layout must give what the relative gives.

| architecture | made of | error | tested |
|---|---|---|---|
"""


def main() -> None:
    rows = []
    for architecture in FAMILIES:
        cases = [case for case in CASES.values() if case.architecture == architecture]
        if cases:
            layers = dict.fromkeys(part for case in cases for part in describe(define_model(case.config, dtype="float32").spec))
            tested = ["two devices", *(["pages"] if any(case.name in PAGED for case in cases) else [])]
            rows.append(f"| {architecture} | {', '.join(layers)} | {max(map(error, cases)):.0e} | {', '.join(tested)} |")
        elif architecture in RELATIVES:
            name, config, _ = RELATIVES[architecture]()
            layers = dict.fromkeys(describe(define_model(config, dtype="float32").spec))
            rows.append(f"| {architecture} | {', '.join(layers)} | | as another: {CASES[name].architecture} |")
    TABLE.write_text(INTRODUCTION + "\n".join(rows) + "\n", "utf-8")


def error(case: Case) -> float:
    """The largest difference of a log-probability of the case."""
    golden = load_golden(case.name)
    model = define_model(case.config, dtype="float32", max_model_len=case.max_model_len)
    params = load_params(model, MemoryCheckpoint(case.tensors()), lambda name, array: jnp.asarray(array))
    got = np.asarray(jax.nn.log_softmax(run_dense(model, params, golden.sequence, golden.encoder)))[golden.positions]
    return float(np.abs(got - np.asarray(jax.nn.log_softmax(golden.logits))).max())


def describe(spec: DecoderSpec) -> list[str]:
    """What is peculiar to a decoder, in words."""
    parts = [part for block in spec.blocks for part in describe_block(block)]
    if spec.encoder:
        parts += ["encoder", *describe(spec.encoder)]
    if spec.learned_positions:
        parts.append("learned positions")
    if any(block.mixer and block.mixer.rope for block in spec.blocks) and any(
        block.mixer and not block.mixer.rope for block in spec.blocks
    ):
        parts.append("layers without rotation")
    if spec.embedding_scale not in (None, 1.0) or spec.logit_scale != 1.0 or any(block.residual_scale != 1.0 for block in spec.blocks):
        parts.append("multipliers")
    if spec.final_softcap is not None:
        parts.append("capped logits")
    if spec.embedding_width is not None:
        parts.append("projected embeddings")
    return parts


def describe_block(block: BlockSpec) -> list[str]:
    kinds = [type(part).__name__.removesuffix("Spec") for part in (block.mixer, block.recurrent, block.feed_forward) if part is not None]
    parts = [{"Attention": "", "MLP": ""}.get(kind, kind) for kind in kinds]
    if isinstance(block.mixer, AttentionSpec):
        parts += describe_attention(block.mixer)
    norm = {"rms": "RMS", "layer": "layer"}[block.norm.kind.split("_")[0]]
    place = {"pre": "before", "output": "on outputs", "sandwich": "around", "post": "after residuals"}
    parts.append(f"{norm} norms {place.get(block.placement, 'before both in parallel')}")
    if hasattr(block.feed_forward, "gated"):
        parts.append(f"{'gated ' if block.feed_forward.gated else ''}{block.feed_forward.activation} MLP")
    if block.layer_input:
        parts.append("inputs by layer")
    return [part for part in parts if part]


def describe_attention(mixer: AttentionSpec) -> list[str]:
    shared = "multi-head" if mixer.num_kv_heads == mixer.num_heads else "one-key-head" if mixer.num_kv_heads == 1 else "grouped-query"
    parts = [f"{shared} attention"]
    if mixer.rope:
        partly = 2 * len(mixer.rope.frequencies) < mixer.head_dim
        parts.append(f"{'partial ' if partly else ''}{'interleaved ' if mixer.rope.interleaved else ''}rope")
    attend = mixer.attend
    named = {
        "ALiBi": attend.alibi, "learned distances": attend.relative, "chunks" if attend.chunked else "windows": attend.window,
        "capped scores": attend.softcap,
        f"QK norm ({mixer.qk_norm_over})": mixer.qk_norm, "shared KV": mixer.cache_of is not None, "values are keys": mixer.key_is_value,
        "growing queries": mixer.temperature, "sinks": mixer.sinks, "clipped QKV": mixer.clip, "gated heads": mixer.gated,
    }  # fmt: skip
    return parts + [name for name, there in named.items() if there]


if __name__ == "__main__":
    main()
