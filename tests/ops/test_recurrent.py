"""Recurrences over ragged rows against the same recurrences token by token, for one sequence after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.recurrent import StateRows, causal_conv, gated_delta_rule, selective_scan, state_space_dual

# (tokens of the row in this step, whether it starts at its beginning); rows of one token come first.
STEPS = {
    "decodes": [(1, False), (1, True), (1, False)],
    "chunks": [(5, True), (64, False), (130, True), (2, False)],
    "many decodes": [(1, i % 3 == 0) for i in range(70)],
    "many mixed": [*((1, i % 3 == 0) for i in range(40)), (66, False), (3, True)],
    "mixed": [(1, True), (1, False), (70, False), (3, True), (129, False)],
}


def make_rows(rows: list[tuple[int, bool]], num_tokens: int, num_rows: int) -> StateRows:
    lens = np.array([count for count, _ in rows] + [0] * (num_rows - len(rows)))
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    pages = np.arange(1, len(rows) + 1)
    padding = np.zeros(num_rows - len(rows), np.int32)
    # The first row goes on in its page, the others leave their page as a snapshot and go on in another.
    write = np.where(pages == 1, pages, pages + len(rows))
    return StateRows(
        q_starts=jnp.asarray(starts),
        token_rows=jnp.asarray(
            np.concatenate([np.repeat(np.arange(num_rows), lens), np.full(num_tokens - starts[-1], num_rows)]), jnp.int32
        ),
        num_decodes=jnp.int32(sum(count == 1 for count, _ in rows)),
        fresh=jnp.asarray([fresh for _, fresh in rows] + [True] * (num_rows - len(rows))),
        read=jnp.asarray(np.concatenate([pages, padding]), jnp.int32),
        write=jnp.asarray(np.concatenate([write, padding]), jnp.int32),
    )


def check(
    step: str,
    op: Callable[..., tuple[jax.Array, jax.Array]],
    token: Callable[..., tuple[np.ndarray, np.ndarray]],
    inputs: list[np.ndarray],
    constants: tuple[Any, ...],
    state_shape: tuple[int, ...],
) -> None:
    """`token(state, *inputs of a token) -> (state, y)` in numpy says what `op` must do."""
    rows = STEPS[step]
    decodes_only = step.endswith("decodes")
    num_rows = len(rows) + 2
    num_tokens = num_rows if decodes_only else sum(count for count, _ in rows) + 7
    spec = make_rows(rows, num_tokens, num_rows)
    pool = np.random.default_rng(1).standard_normal((2 * len(rows) + 2, *state_shape)).astype(np.float32)
    inputs = [x[:num_tokens] for x in inputs]
    got, new_pool = jax.jit(lambda pool, rows, *inputs: op(*inputs, *constants, pool, rows))(
        jnp.asarray(pool), spec, *map(jnp.asarray, inputs)
    )

    expected_pool = pool.copy()
    for r, (count, fresh) in enumerate(rows):
        start = int(spec.q_starts[r])
        state = np.zeros(state_shape, np.float32) if fresh else pool[int(spec.read[r])]
        for t in range(start, start + count):
            state, y = token(state, *(x[t] for x in inputs))
            np.testing.assert_allclose(got[t], y, rtol=2e-4, atol=2e-4)
        expected_pool[int(spec.write[r])] = state
    np.testing.assert_allclose(new_pool[1:], expected_pool[1:], rtol=2e-4, atol=2e-4)
    assert np.isfinite(got).all()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


TOKENS = 220


@pytest.mark.parametrize("step", STEPS)
def test_convolution_goes_on_where_the_row_stopped(step: str) -> None:
    taps, bias = draw(6, 4), draw(6)

    def token(state: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen = np.concatenate([state, x[:, None]], axis=1)
        return seen[:, 1:], (seen * taps).sum(1) + bias

    check(step, causal_conv, token, [draw(TOKENS, 6)], (taps, bias), (6, 3))


def test_convolution_of_one_position_keeps_nothing() -> None:
    rows, x, taps = make_rows(STEPS["chunks"], 210, 4), jnp.asarray(draw(210, 6)), jnp.asarray(draw(6, 1))
    y, pool = causal_conv(x, taps, None, jnp.zeros((9, 6, 0)), rows)
    np.testing.assert_allclose(y, x * taps[:, 0], rtol=1e-6)
    assert pool.shape == (9, 6, 0)


@pytest.mark.parametrize("step", STEPS)
def test_selective_scan_equals_its_recurrence(step: str) -> None:
    a = -np.exp(draw(6, 3))

    def op(x, dt, b, c, pool, rows):
        return selective_scan(x, dt, jnp.asarray(a), b, c, pool, rows)

    def token(state, x, dt, b, c):
        state = np.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b
        return state, state @ c

    inputs = [draw(TOKENS, 6), np.abs(draw(TOKENS, 6, seed=1)), draw(TOKENS, 3), draw(TOKENS, 3, seed=1)]
    check(step, op, token, inputs, (), (6, 3))


@pytest.mark.parametrize("step", STEPS)
def test_state_space_duality_equals_its_recurrence(step: str) -> None:
    groups, heads, dim, size = 2, 3, 4, 5
    a = -np.exp(draw(groups, heads))

    def op(x, dt, b, c, pool, rows):
        return state_space_dual(x, dt, jnp.asarray(a), b, c, pool, rows)

    def token(state, x, dt, b, c):
        state = np.exp(dt * a)[..., None, None] * state + np.einsum("gh,ghp,gs->ghps", dt, x, b)
        return state, np.einsum("ghps,gs->ghp", state, c)

    shapes = [(groups, heads, dim), (groups, heads), (groups, size)]
    x, dt, b = (draw(TOKENS, *shape) for shape in shapes)
    check(step, op, token, [x, np.abs(dt), b, draw(TOKENS, groups, size, seed=1)], (), (groups, heads, dim, size))


@pytest.mark.parametrize("step", STEPS)
def test_gated_delta_rule_equals_its_recurrence(step: str) -> None:
    groups, heads, dim, values = 2, 3, 4, 5

    def token(state, q, k, v, decay, beta):
        state = np.exp(decay)[..., None, None] * state
        learned = beta[..., None] * (v - np.einsum("ghde,gd->ghe", state, k))
        state = state + np.einsum("gd,ghe->ghde", k, learned)
        return state, np.einsum("ghde,gd->ghe", state, q)

    q, k = draw(TOKENS, groups, dim), draw(TOKENS, groups, dim, seed=1)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[100:160] = k[100]  # equal keys are the hard case of the triangular system
    beta = 1 / (1 + np.exp(-4 * draw(TOKENS, groups, heads)))
    inputs = [q, k, draw(TOKENS, groups, heads, values), -0.1 * np.abs(draw(TOKENS, groups, heads, seed=1)), beta]
    check(step, gated_delta_rule, token, inputs, (), (groups, heads, dim, values))
