"""Tables of checkpoint names of recurrent layers; `at` is what the names of one begin with."""

from __future__ import annotations

from jaxllm.weights.rules import Rule, rule
from jaxllm.weights.transforms import COPY, FLAT, INTERLEAVE, SPLIT_OUTPUTS, TAPS, GroupRows, Transform


def _rules(at: str, names: dict[str, tuple[str, Transform]]) -> tuple[Rule, ...]:
    return tuple(rule(f"layers.{{i}}.recurrent.{param}", f"{at}.{source}", transform=how) for param, (source, how) in names.items())


def mamba_rules(at: str) -> tuple[Rule, ...]:
    """Those of a Mamba layer."""
    return _rules(
        at,
        {
            "projection": ("in_proj.weight", GroupRows("projection")),
            "projection_bias": ("in_proj.bias", GroupRows("projection")),
            "conv": ("conv1d.weight", TAPS),
            "conv_bias": ("conv1d.bias", COPY),
            "inner": ("x_proj.weight", COPY),
            "steps": ("dt_proj.weight", COPY),
            "steps_bias": ("dt_proj.bias", COPY),
            "a_log": ("A_log", COPY),
            "d": ("D", COPY),
            **{f"{part}_norm.weight": (f"{part}_layernorm.weight", COPY) for part in ("dt", "b", "c")},
            "out": ("out_proj.weight", COPY),
            "out_bias": ("out_proj.bias", COPY),
        },
    )


def mamba2_rules(at: str) -> tuple[Rule, ...]:
    """Those of a Mamba 2 layer."""
    return _rules(
        at,
        {
            "projection": ("in_proj.weight", GroupRows("projection")),
            "projection_bias": ("in_proj.bias", GroupRows("projection")),
            "conv": ("conv1d.weight", GroupRows("conv", taps=True)),
            "conv_bias": ("conv1d.bias", GroupRows("conv")),
            "a_log": ("A_log", FLAT),
            "d": ("D", FLAT),
            "dt_bias": ("dt_bias", FLAT),
            "norm.weight": ("norm.weight", FLAT),
            "out": ("out_proj.weight", COPY),
            "out_bias": ("out_proj.bias", COPY),
        },
    )


def delta_net_rules(at: str, projection: tuple[str, ...], rates: tuple[str, ...]) -> tuple[Rule, ...]:
    """Those of a gated delta net. Its projections are one tensor, ordered by group of heads; or queries, keys and values, and the gate; and
    likewise its rates (of learning, of decay).
    """
    grouped = len(projection) == 1
    sources = [f"{at}.{name}.weight" for name in projection]
    return (
        rule("layers.{i}.recurrent.projection", *sources, transform=SPLIT_OUTPUTS if grouped else GroupRows("projection", (3, 1))),
        rule("layers.{i}.recurrent.rates", *(f"{at}.{name}.weight" for name in rates), transform=SPLIT_OUTPUTS if grouped else INTERLEAVE),
        *_rules(
            at,
            {
                "conv": ("conv1d.weight", GroupRows("conv", taps=True)),
                "a_log": ("A_log", FLAT),
                "dt_bias": ("dt_bias", FLAT),
                "norm.weight": ("norm.weight", COPY),
                "out": ("out_proj.weight", COPY),
            },
        ),
    )


def short_conv_rules(at: str) -> tuple[Rule, ...]:
    """Those of a gated short convolution."""
    return _rules(
        at,
        {
            "projection": ("in_proj.weight", GroupRows("projection")),
            "projection_bias": ("in_proj.bias", GroupRows("projection")),
            "conv": ("conv.weight", TAPS),
            "conv_bias": ("conv.bias", COPY),
            "out": ("out_proj.weight", COPY),
            "out_bias": ("out_proj.bias", COPY),
        },
    )
