"""Products with weights of few bits: `weight.py` is the contract, `reference.py` the oracle; `jaxllm/ops/quantized_linear.py` says what
runs where.
"""
