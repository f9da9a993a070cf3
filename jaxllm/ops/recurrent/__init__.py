"""Recurrences over the ragged rows of a step, with a state a row that lives in pages.

    op(inputs, ..., pool, rows) -> (outputs, pool)

`inputs` are those of T tokens, decodes first, then prompt chunks; `pool` [N, ...] holds a state a page. Each row starts from the state on
its page to read (zeros where it is at its beginning) and leaves its state on its page to write. All arithmetic is in float32.
"""

from jaxllm.ops.recurrent.conv import causal_conv
from jaxllm.ops.recurrent.delta_rule import gated_delta_rule
from jaxllm.ops.recurrent.rows import StateRows
from jaxllm.ops.recurrent.selective_scan import selective_scan
from jaxllm.ops.recurrent.ssd import state_space_dual

__all__ = ["StateRows", "causal_conv", "gated_delta_rule", "selective_scan", "state_space_dual"]
