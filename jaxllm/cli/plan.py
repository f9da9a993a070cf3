"""`jaxllm plan MODEL --target v6e:2x2`: what an engine would need and could do on accelerators that are not there.

No jax here: the arithmetic and the compiler run in processes of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm import errors
from jaxllm.cli.parser import CommandParser
from jaxllm.config import CONFIG_GROUPS, EngineConfig, ModelConfig
from jaxllm.errors import ConfigError, JaxllmError, ModelLoadError
from jaxllm.model_files import ModelFiles, overridden, read_json
from pallas_kernels.aot import AotError, compile_isolated, run_isolated
from pallas_kernels.devices import DEVICES, Target, UnknownTargetError, parse_target

_ARITHMETIC_TIMEOUT_S = 300


def build_parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        "Plan an engine for accelerators that are not there, from config.json alone: does it fit, what would, how fast can it be at best.\n"
        "Compiles the real step for the real target. Takes the options of `serve`; MODEL may be a config.json, too.\n"
        "Exit status: 0 where it fits, 1 where it does not.",
        groups=CONFIG_GROUPS,
        positional_model=True,
    )
    own = parser.own.add_argument
    names = ", ".join(f"{d.name}:{d.slices[1]}" for d in DEVICES.values())
    own("--target", metavar="TARGET", help=f"Accelerators, as {names}; --tensor-parallel-size is by default all of them")
    own("--context-len", type=int, metavar="N", help="Tokens that each request holds in the estimates [2048, or max_model_len if less]")
    own("--buckets", choices=("none", "largest", "all"), default="largest", help="Steps to compile: the largest of each kind, or others")
    own("--layers", type=int, metavar="N", help="Compile only so many first layers: quicker, but temporaries may grow with the others")
    own("--compile-timeout", type=float, default=300, metavar="S", help="Seconds for each compilation [300]")
    own("--json", action="store_true", help="Print JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    args = build_parser().parse(argv)
    own = args.own
    try:
        target = parse_target(_required(own.target))
    except UnknownTargetError as error:
        raise ConfigError(str(error)) from None
    options = {"tensor_parallel_size": target.num_devices} | args.options
    config = EngineConfig.from_options(**options)
    report = make_report(config, target, context_len=own.context_len)
    if report["fits"]:
        compiled = compile_steps(report, config, own.buckets, own.layers, own.compile_timeout, progress=_say)
        report |= compiled
    print(json.dumps(report, indent=2) if own.json else "\n".join(as_text(report)))
    return 0 if report["fits"] else 1


def _required(target: str | None) -> str:
    if target is None:
        raise ConfigError(f"--target is needed: one of {', '.join(f'{d.name}:{d.slices[0]}' for d in DEVICES.values())} or a larger one")
    return target


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------ the report


def make_report(config: EngineConfig, target: Target, *, context_len: int | None = None) -> dict[str, Any]:
    """The answer of `jaxllm.plan`.

    Raises:
        JaxllmError: what `serve` would raise for this model and these options.
    """
    shards = config.parallel.tensor_parallel_size
    if shards > target.num_devices:
        raise ConfigError(f"tensor_parallel_size={shards}, but {target.name} has {target.num_devices} device(s)")
    files = _find_files(config.model)
    request = {
        "target": target.name,
        "config": config.to_json(),
        "kind": files.kind,
        "name": files.name,
        "hf_config": files.config,
        "context_len": context_len,
    }
    try:
        found = run_isolated("jaxllm.plan", request, timeout_s=_ARITHMETIC_TIMEOUT_S)
    except AotError as error:
        raise JaxllmError(str(error)) from None
    if "error" in found:
        raise getattr(errors, found["error"])(found["message"])
    return found | {"hf_config": files.config}


def _find_files(model: ModelConfig) -> ModelFiles:
    """The model's config; weights are not fetched."""
    from jaxllm.weights.download import resolve_model

    path = Path(model.model or "").expanduser()
    if path.suffix != ".json" or not path.is_file():
        return resolve_model(replace(model, load_format="auto" if path.suffix == ".gguf" else "dummy"))
    values = read_json(path)
    if values is None:
        raise ModelLoadError(f"{path} cannot be read")
    folder = path.parent
    return ModelFiles(
        kind="hf", path=folder, config=overridden(values, model.hf_overrides), generation_config={}, name=str(path), tokenizer_path=folder
    )


def compile_steps(
    report: dict[str, Any], config: EngineConfig, which: str, num_layers: int | None, timeout_s: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Compile buckets of the planned engine, one after the other: {"steps": [...]}, and "not_compiled" with the reason where it stopped."""
    buckets = report["buckets"]
    if which == "none":
        return {"steps": []}
    if which == "largest":
        decodes = [bucket for bucket in buckets if bucket[0] == bucket[1]]
        buckets = [decodes[-1], buckets[-1]]
    request = {
        "target": report["target"],
        "hf_config": report["hf_config"],
        "num_layers": num_layers,
        **{name: report[name] for name in ("dtype", "tensor_parallel_size", "page_size", "num_pages", "max_model_len", "max_num_seqs")},
    }
    steps: list[dict[str, Any]] = []
    for tokens, rows in buckets:
        progress(f"compiling a step of {tokens} tokens in {rows} rows for {report['target']} ...")
        try:
            found = compile_isolated("jaxllm.runner.aot", request | {"num_tokens": tokens, "num_rows": rows}, timeout_s=timeout_s)
        except AotError as error:
            return {"steps": steps, "not_compiled": str(error)}
        steps.append({"num_tokens": tokens, "num_rows": rows} | found)
    return {"steps": steps}


# -------------------------------------------------------------------------------------------------------------------- for people


def as_text(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines."""
    device = report["device"]
    yield f"{report['model']}: {report['architecture']}, {report['num_params'] / 1e9:.2f} billion parameters in {report['dtype']}"
    yield (
        f"{report['target']}: {report['num_chips']} chip(s), {report['num_devices']} device(s) of {device['hbm_bytes'] / 2**30:.1f} GiB,"
        f" {device['hbm_bytes_per_s'] / 1e12:.2f} TB/s and {device['bf16_flops'] / 1e12:.0f} TFLOP/s each;"
        f" tensor_parallel_size {report['tensor_parallel_size']}, attention: {report['attention']}"
    )
    yield ""
    yield f"fits: {'yes' if report['fits'] else 'no'}"
    yield from _memory(report["memory"])
    if not report["fits"]:
        yield f"  {report['reason']}"
        fitting = ", ".join(report["would_fit"])
        yield f"would fit: {fitting}" if fitting else "no target that can be planned for holds it"
        return
    yield from _cache(report)
    yield ""
    yield from _speed(report)
    yield ""
    yield from _steps(report)


def _memory(memory: dict[str, int]) -> Iterator[str]:
    names = {"temporaries": "temporaries (reserved)", "kv_cache": "KV cache", "usable": "usable"}
    yield "memory per device:"
    for name in ("weights", "sampling_state", "temporaries", "kv_cache", "usable"):
        if name in memory:
            yield f"  {names.get(name, name.replace('_', ' ')):<24}{memory[name] / 2**30:>9.3f} GiB"


def _cache(report: dict[str, Any]) -> Iterator[str]:
    yield f"KV cache: {report['kv_tokens']:,} tokens of {report['kv_bytes_per_token'] / 1024:.1f} KiB per device"
    for length, count in report["requests"].items():
        yield f"  requests of {int(length):,} tokens at once: {count:.1f}"


def _speed(report: dict[str, Any]) -> Iterator[str]:
    """The rooflines; what devices tell each other is added where a decode step was compiled."""
    chips = report["num_chips"]
    per_row = _collective_bytes_per_row(report)
    yield f"decode at best, requests of {report['context_len']:,} tokens:"
    yield f"  {'batch':>6}{'ms/step':>10}{'tokens/s':>11}{'per chip':>10}{'GFLOP':>9}{'GB read':>9}{'links ms':>10}  bound"
    for row in report["decode"]:
        links = per_row * row["batch"] / report["device"]["link_bytes_per_s"]
        seconds = row["seconds"] + links
        rate = row["batch"] / seconds
        yield (
            f"  {row['batch']:>6}{seconds * 1e3:>10.2f}{rate:>11,.0f}{rate / chips:>10,.0f}{row['flops'] / 1e9:>9,.1f}"
            f"{row['bytes'] / 1e9:>9.2f}{links * 1e3:>10.3f}  {row['bound']}"
        )
    prefill = report["prefill"]
    rate = prefill["tokens"] / prefill["seconds"]
    yield (
        f"prefill at best: {rate:,.0f} tokens/s ({rate / chips:,.0f} per chip), chunks of {prefill['tokens']:,} tokens,"
        f" bound by {prefill['bound']}"
    )


def _collective_bytes_per_row(report: dict[str, Any]) -> float:
    """What each device sends for one row of a decode, by the largest decode step that was compiled; 0 where none was."""
    shards = report["tensor_parallel_size"]
    for step in reversed(report.get("steps", [])):
        if step["num_tokens"] == step["num_rows"]:
            return sum(_sent(c, shards) * _depth(c, step, report) for c in step["collectives"]) / step["num_rows"]
    return 0.0


def _sent(collective: dict[str, Any], shards: int) -> float:
    """Bytes that each device sends in a ring: all but its own share, and twice that to reduce and spread."""
    share = collective["bytes"] * (shards - 1) / shards
    return 2 * share if collective["kind"] == "all-reduce" else share


def _depth(collective: dict[str, Any], step: dict[str, Any], report: dict[str, Any]) -> float:
    """How often the whole model does what the compiled layers do once."""
    return report["num_layers"] / step["num_layers"] if collective["in_layers"] else 1.0


def _steps(report: dict[str, Any]) -> Iterator[str]:
    for step in report["steps"]:
        kind = "decodes" if step["num_tokens"] == step["num_rows"] else "prompt tokens and decodes"
        layers = "all layers" if step["num_layers"] == report["num_layers"] else f"{step['num_layers']} of {report['num_layers']} layers"
        yield f"compiled: {step['num_tokens']:,} tokens in {step['num_rows']} rows ({kind}) in {step['seconds']:.1f} s; {layers}"
        in_place = "updated in place" if step["alias_bytes"] >= step["cache_bytes"] else "copied"
        temporaries, reserved = step["temp_bytes"] / 2**20, report["memory"]["temporaries"] / 2**20
        yield f"  temporaries {temporaries:.1f} MiB of {reserved:.0f} reserved; pages are {in_place}"
        for found in step["collectives"]:
            where, count = ("a layer", found["count"] / step["num_layers"]) if found["in_layers"] else ("outside of layers", found["count"])
            size = found["bytes"] / found["count"]
            yield f"  {found['kind']}: {count:g} {where}, {size / 1024:,.0f} KiB each"
    if "not_compiled" in report:
        yield f"not compiled: {report['not_compiled']}"
