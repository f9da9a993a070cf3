"""The models whose outputs transformers gave beforehand, by name.

`scripts/make_golden.py` (needs torch and transformers) writes `tests/golden/<name>.npz`; everything else needs numpy only.
"""

from __future__ import annotations

from tests.golden.case import Case
from tests.golden.cases import dense, encoder_decoder, llama, moe, recurrent

CASES: dict[str, Case] = {case.name: case for case in (*llama.CASES, *dense.CASES, *moe.CASES, *recurrent.CASES, *encoder_decoder.CASES)}
# One case of each architecture, for tests that need no more.
BY_ARCHITECTURE = {case.architecture: case for case in reversed(CASES.values())}
# The whole engine runs these decoders (`tests/runner/test_golden_engine.py`), the others are compared as whole sequences.
FAMILY_CASES = [name for name, case in CASES.items() if BY_ARCHITECTURE[case.architecture] is case and case not in encoder_decoder.CASES]
