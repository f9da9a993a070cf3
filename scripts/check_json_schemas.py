"""Every schema is refused, or every output that it constrains is valid.

    python scripts/check_json_schemas.py [--count N] [--seed S] [SUITE]

SUITE is a folder of the JSON Schema Test Suite (tests/draft2020-12 of github.com/json-schema-org/JSON-Schema-Test-Suite); schemas are drawn
from it, and made at random. A model of random weights generates under each; outputs that ended by themselves are validated. Exits with 1
where one is not valid or a schema was neither refused nor kept to.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.errors import InvalidRequestError
from tests.checkpoints import FIRST_BYTE_ID, tiny_config, write_model
from tests.random_schemas import misfit, random_schema

OPTIONS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
# Random text would seldom come to its end.
BIAS = {FIRST_BYTE_ID + ord(char): 6.0 for char in '"}],'}


def schemas(rng: random.Random, suite: Path | None) -> Iterator[Any]:
    groups = [group for path in sorted(suite.glob("*.json")) for group in json.loads(path.read_text())] if suite is not None else []
    rng.shuffle(groups)
    for group in groups:
        yield group["schema"]
        yield random_schema(rng)
    while True:
        yield random_schema(rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", type=Path, metavar="SUITE")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = schemas(random.Random(args.seed), args.suite)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), tiny_config("LlamaForCausalLM", vocab_size=512, max_position_embeddings=512))
        llm = LLM(folder, **OPTIONS)
        kept, refused = [], 0
        for _ in range(args.count):
            schema = next(found)
            try:
                constraint = StructuredOutputsParams(json=schema)
                params = SamplingParams(structured_outputs=constraint, max_tokens=200, logit_bias=BIAS, seed=len(kept))
                llm._front.input.process("x", "x", params)
            except InvalidRequestError:
                refused += 1
            else:
                kept.append((schema, params))
        outputs = llm.generate(["x"] * len(kept), [params for _, params in kept], use_tqdm=False)
        ended = wrong = 0
        for (schema, _), output in zip(kept, outputs, strict=True):
            choice = output.outputs[0]
            ended += choice.finish_reason == "stop"
            error = misfit(schema, choice.text) if choice.finish_reason == "stop" else None if choice.finish_reason == "length" else choice
            if error is not None:
                wrong += 1
                print(f"{json.dumps(schema)[:600]}\n    {choice.text[:300]!r}: {str(error)[:300]}")
    print(f"{args.count} schemas: {refused} refused; of {len(kept)} outputs {ended} ended by themselves; {wrong} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
