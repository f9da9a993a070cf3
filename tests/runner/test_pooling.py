"""What the pooling runner does beyond the mathematics: one bad prompt, and shapes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.buckets import pooling_ladder
from jaxllm.runner.pooling import NOT_FINITE, finished
from tests.golden.pooling_cases import CASES
from tests.runner.pooling import arrays, make_runner, run


def test_a_prompt_that_overflows_fails_alone() -> None:
    runner = make_runner(CASES["bert"].config, bare=True)
    place = runner.model_def.names.index("embed.weight")
    runner._params[place] = runner._params[place].at[77].set(np.inf)
    params = PoolingParams(task="embed")

    good, bad, other = run(runner, [[5, 6, 7], [8, 77, 9], [10, 11]], params)

    assert bad.pooled is None
    assert bad.error == NOT_FINITE
    alone = arrays(run(runner, [[5, 6, 7]], params))[0]
    assert np.allclose(arrays([good])[0], alone, atol=1e-6)
    assert other.error is None


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (8, 16), (128, 1024), (512, 100), (300, 8192)])
def test_every_step_within_the_limits_has_a_shape(seqs: int, tokens: int) -> None:
    ladder = pooling_ladder(seqs, tokens)
    assert all(any(bucket.fits(total, rows) for bucket in ladder) for total in (1, tokens) for rows in (1, min(seqs, total)))
    assert not any(bucket.decode_only for bucket in ladder)


@pytest.mark.parametrize("activation", ["normalize", "softmax", "sigmoid", "tanh", "identity"])
def test_the_last_activation_is_finite_for_large_logits(activation: str) -> None:
    raw = np.array([[1000.0, -1000.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    result = finished(raw, activation, PoolingParams(task="classify"))
    assert np.isfinite(result).all()
    assert np.array_equal(finished(raw, activation, PoolingParams(task="classify", use_activation=False)), raw)
