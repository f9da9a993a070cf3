"""Write docs/models.md from the tests: every architecture, what it is made of, how far it is from its reference, and what compiles it.

    python scripts/model_table.py [--target v6e] [--architectures LlamaForCausalLM ...]

Without a target it runs the golden cases of the architectures (a minute or two on CPU). With one it compiles a step of each for an
accelerator that need not be there: pip install 'jaxllm[plan-tpu,plan-gpu]' brings the compilers. What is not asked for stays as it is in
the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.models.build import define_model
from jaxllm.models.registry import FAMILIES
from jaxllm.runner.aot import compile_step
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec
from jaxllm.weights.rules import load_params
from pallas_kernels.aot import compiler_environment
from tests.checkpoints import MemoryCheckpoint
from tests.dense import run_dense
from tests.golden.ahead_of_time import attention_backend, step_request
from tests.golden.case import Case, load_golden
from tests.golden.cases import CASES
from tests.golden.test_relatives import RELATIVES

TABLE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
INTRODUCTION = """# Models

Made by `scripts/model_table.py` from the tests; do not edit.

The error is the largest difference of a log-probability from transformers' in float32, over all golden cases of the architecture. Every
architecture also runs through the whole engine over two devices (tensor parallelism): prompts in chunks and at least 24 tokens decoded from
pages must give the tokens and log-probabilities of transformers. *As another* means that transformers has no such model of its own, or that
only the text half of a multimodal one is served: the weights of the named relative in its layout must become the relative's.

The columns of devices say what runs the attention of a step of decodes, in bfloat16, as compiled ahead of time for that device: a kernel
of ours, or XLA. What is empty was not tried.

| architecture | made of | error | v6e | h100 | tested |
|---|---|---|---|---|---|
"""
TARGETS = {"v6e": "v6e:1x1", "h100": "h100:1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--architectures", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="ARCHITECTURE")
    args = parser.parse_args()
    if args.target:
        os.environ.update(compiler_environment(args.target))
    rows = {cells[0]: cells for cells in map(cells_of, TABLE.read_text("utf-8").splitlines()) if len(cells) == 6}
    for architecture in args.architectures:
        rows[architecture] = row(architecture, rows.get(architecture, [""] * 6), args.target)
        print(" | ".join(rows[architecture]), flush=True)
        lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in rows[name]) for name in FAMILIES if name in rows]
        TABLE.write_text(INTRODUCTION + "\n".join(lines) + "\n", "utf-8")


def cells_of(line: str) -> list[str]:
    """The cells of a row of the table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def row(architecture: str, before: list[str], target: str | None) -> list[str]:
    """The cells of an architecture; those that are not asked for are those of `before`."""
    cases = [case for case in CASES.values() if case.architecture == architecture]
    if not cases:
        name, config, _ = RELATIVES[architecture]()
        layers = dict.fromkeys(describe(define_model(config, dtype="float32").spec))
        return [architecture, ", ".join(layers), "", "", "", f"as another: {CASES[name].architecture}"]
    layers = dict.fromkeys(part for case in cases for part in describe(define_model(case.config, dtype="float32").spec))
    worst = before[2] if target else f"{max(map(error, cases)):.0e}"
    compiled = [backend(cases[0], TARGETS[name]) if name == target else cell for name, cell in zip(TARGETS, before[3:5], strict=True)]
    return [architecture, ", ".join(layers), worst, *compiled, "engine, two devices"]


def backend(case: Case, target: str) -> str:
    """What runs the attention of the case on a target, or why nothing does."""
    try:
        return attention_backend(case, compile_step(step_request(case, target))["kernels"])
    except Exception as error:  # the other cases are still worth compiling
        return f"refused: {str(error).splitlines()[0][:160]}"


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
    place = {"pre": "before", "output": "on outputs", "sandwich": "around", "sandwich_mixer": "around", "post": "after residuals"}
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
