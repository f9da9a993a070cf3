"""Products with weights of few bits: `weight.py` is the contract, `reference.py` the oracle, `choose.py` what runs where and why."""
