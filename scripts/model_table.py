"""Write docs/models.md from the tests: every architecture, what it is made of, how far it is from its reference, and what compiles it.

    python scripts/model_table.py [--target v6e] [--architectures LlamaForCausalLM BertModel "encoder of T5ForConditionalGeneration" ...]

Without a target it runs the golden cases of the architectures (a minute or two on CPU). With one it compiles a step of each for an
accelerator that need not be there: pip install 'jaxllm[plan-tpu,plan-gpu]' brings the compilers. What is not asked for stays as it is in
the page.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.models.build import define_model
from jaxllm.models.pooling import define_pooling
from jaxllm.models.registry import FAMILIES
from jaxllm.runner.aot import compile_step
from jaxllm.specs import AttentionSpec, BlockSpec, DecoderSpec, PoolingSpec
from jaxllm.weights.rules import load_params
from pallas_kernels.aot import compiler_environment
from tests.checkpoints import MemoryCheckpoint
from tests.dense import run_dense
from tests.golden.ahead_of_time import attention_backend, encoder_request, pooling_request, step_request
from tests.golden.case import Case, load_golden
from tests.golden.cases import CASES
from tests.golden.pooling_cases import CASES as POOLING_CASES
from tests.golden.pooling_cases import PoolingCase
from tests.golden.test_relatives import RELATIVES
from tests.runner.pooling import largest_error

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
POOLING_INTRODUCTION = """
## Pooling models and encoders

A step of these takes whole inputs and has no pages. The error is the largest difference from transformers' in float32, of hidden states or
of scores before the last activation, over all golden cases of the architecture. The columns of devices say what runs attention within the
inputs of a step in bfloat16, as compiled ahead of time for that device: XLA (`jaxllm/ops/attention/segments.py`). Any decoder of the table
above is pooled in the same way, but for those that [pooling.md](pooling.md) names: the ones here stand for them.

| architecture | made of | error | v6e | h100 | tested |
|---|---|---|---|---|---|
"""
TARGETS = {"v6e": "v6e:1x1", "h100": "h100:1"}


def title(case: PoolingCase) -> str:
    """What the table calls the model of a pooling case."""
    if case.token_ids:
        return f"{case.architecture} of two tokens"
    return f"embeddings of {case.architecture}" if case.architecture in FAMILIES else case.architecture


POOLED = {title(case): [other for other in POOLING_CASES.values() if title(other) == title(case)] for case in POOLING_CASES.values()}
ENCODERS = {f"encoder of {case.architecture}": case for case in CASES.values() if case.config["model_type"] in ("t5", "bart")}


def main() -> None:
    every = [*FAMILIES, *POOLED, *ENCODERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--architectures", nargs="+", choices=every, default=every, metavar="ARCHITECTURE")
    args = parser.parse_args()
    if args.target:
        os.environ.update(compiler_environment(args.target))
    rows = {cells[0]: cells for cells in map(cells_of, TABLE.read_text("utf-8").splitlines()) if len(cells) == 6}
    for architecture in args.architectures:
        make = row if architecture in FAMILIES else pooling_row
        rows[architecture] = make(architecture, rows.get(architecture, [""] * 6), args.target)
        print(" | ".join(rows[architecture]), flush=True)
        lines = {name: "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for name, cells in rows.items()}
        generating, others = ("".join(lines.get(name, "") for name in names) for names in (FAMILIES, (*POOLED, *ENCODERS)))
        TABLE.write_text(INTRODUCTION + generating + POOLING_INTRODUCTION + others, "utf-8")


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
    compiled = on_targets(before, target, lambda at: attention_backend(cases[0], compile_step(step_request(cases[0], at))["kernels"]))
    return [architecture, ", ".join(layers), worst, *compiled, "engine, two devices"]


def pooling_row(name: str, before: list[str], target: str | None) -> list[str]:
    """The cells of a model that is pooled, or of an encoder; those that are not asked for are those of `before`."""
    if name in ENCODERS:
        case = ENCODERS[name]
        encoder = define_model(case.config, dtype="float32").spec.encoder
        assert encoder is not None
        layers, worst, tested, request = describe(encoder), "", "with its decoder, above", partial(encoder_request, case)
    else:
        cases = POOLED[name]
        models = [define_pooling(case.config, dtype="float32", token_ids=case.token_ids) for case in cases]
        layers = [part for model in models for part in describe_pooling(model.pooling)]
        worst = before[2] if target else f"{max(map(largest_error, cases)):.0e}"
        tested, request = "answers of one step", partial(pooling_request, cases[0])

    def compiles(at: str) -> str:
        return "kernel" if compile_step(request(at))["kernels"] else "XLA"

    return [name, ", ".join(dict.fromkeys(layers)), worst, *on_targets(before, target, compiles), tested]


def on_targets(before: list[str], target: str | None, compiled: Callable[[str], str]) -> list[str]:
    """The cells of all targets, of which one is asked for: what was compiled for it says, or why it could not be."""

    def cell(name: str, old: str) -> str:
        if name != target:
            return old
        try:
            return compiled(TARGETS[name])
        except Exception as error:  # the other cases are still worth compiling
            return f"refused: {str(error).splitlines()[0][:160]}"

    return [cell(name, old) for name, old in zip(TARGETS, before[3:5], strict=True)]


def error(case: Case) -> float:
    """The largest difference of a log-probability of the case."""
    golden = load_golden(case.name)
    model = define_model(case.config, dtype="float32", max_model_len=case.max_model_len)
    params = load_params(model, MemoryCheckpoint(case.tensors()), lambda name, array: jnp.asarray(array))
    got = np.asarray(jax.nn.log_softmax(run_dense(model, params, golden.sequence, golden.encoder)))[golden.positions]
    return float(np.abs(got - np.asarray(jax.nn.log_softmax(golden.logits))).max())


def describe_pooling(spec: PoolingSpec) -> list[str]:
    """What is peculiar to a pooling model, in words."""
    parts = describe(spec.backbone)
    if any(isinstance(block.mixer, AttentionSpec) and not block.mixer.attend.causal for block in spec.backbone.blocks):
        parts.append("both sides")
    if spec.backbone.embedding_norm:
        parts.append("normed embeddings")
    if spec.task == "classify":
        parts.append(f"classes of {'tokens' if spec.per_token else {'cls': 'the first token'}.get(spec.kinds[0], f'the {spec.kinds[0]}')}")
    return parts


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
    place = {
        "pre": "before",
        "pre_mlp": "before",
        "output": "on outputs",
        "sandwich": "around",
        "sandwich_mixer": "around",
        "post": "after residuals",
    }
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
