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

import jsonschema

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.errors import InvalidRequestError
from jaxllm.text.grammar import output_grammar
from jaxllm.text.grammar_compiler import grammar_compiler
from tests.checkpoints import FIRST_BYTE_ID, tiny_config, write_model

OPTIONS = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
# Random text would seldom come to its end.
BIAS = {FIRST_BYTE_ID + ord(char): 6.0 for char in '"}],'}
NAMES = ("a", "b", "name", "größe", 'quo"te', "x" * 30)


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema of most kinds, with bounds that are sometimes contradictory or not supported."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "any"]
    kinds += ["object", "object", "array", "anyOf", "oneOf", "allOf", "not", "ref", "types"] if depth else []
    match rng.choice(kinds):
        case "string":
            more = [{}, {"maxLength": rng.randint(0, 8)}, {"minLength": 2, "maxLength": rng.randint(1, 9)}, {"pattern": "^[a-c]{1,4}$"}]
            return {"type": "string", **rng.choice([*more, {"format": rng.choice(["date", "uuid", "ipv4", "email", "unknown"])}])}
        case "integer" | "number" as kind:
            bounds = [
                {},
                {"minimum": rng.randint(-50, 50)},
                {"exclusiveMaximum": rng.randint(-5, 5)},
                {"multipleOf": rng.choice([2, 5, 0.5])},
            ]
            return {"type": kind, **rng.choice(bounds), **rng.choice(bounds)}
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample([1, "1", None, True, [1], {"a": 2}, "ü", 1.5, ""], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice([0, "x", None, False, [], {"k": [1]}])}
        case "any":
            return rng.choice([{}, True, False])
        case "object":
            names = rng.sample(NAMES, rng.randint(0, 4))
            schema: dict[str, Any] = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
            schema["required"] = rng.sample(names, rng.randint(0, len(names)))
            extra = [
                {},
                {"additionalProperties": False},
                {"additionalProperties": random_schema(rng, 0)},
                {"minProperties": 1},
                {"maxProperties": 2},
            ]
            return {**schema, **rng.choice(extra), **rng.choice([{}, {}, {"patternProperties": {"^z": {"type": "integer"}}}])}
        case "array":
            shapes = [
                {"items": random_schema(rng, depth - 1)},
                {"prefixItems": [random_schema(rng, depth - 1)], "items": False},
                {"uniqueItems": True},
            ]
            return {
                "type": "array",
                **rng.choice(shapes),
                **rng.choice([{"maxItems": 3}, {"minItems": 1, "maxItems": 2}, {"minItems": 3, "maxItems": 1}]),
            }
        case "anyOf" | "oneOf" | "allOf" as word:
            return {word: [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "not":
            return {"not": random_schema(rng, 0)}
        case "ref":
            return {"$ref": "#/$defs/r", "$defs": {"r": random_schema(rng, depth - 1)}}
        case _:
            return {"type": rng.sample(["string", "integer", "boolean", "null", "array"], 2), "maxLength": 4, "maxItems": 2}


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
        compiler = grammar_compiler(llm.get_tokenizer(), 512)
        kept, refused = [], 0
        for _ in range(args.count):
            schema = next(found)
            try:
                params = StructuredOutputsParams(json=schema)
                compiler.check(output_grammar(params), [])
            except InvalidRequestError:
                refused += 1
            else:
                kept.append((schema, SamplingParams(structured_outputs=params, max_tokens=200, logit_bias=BIAS, seed=len(kept))))
        outputs = llm.generate(["x"] * len(kept), [params for _, params in kept], use_tqdm=False)
        ended = wrong = 0
        for (schema, _), output in zip(kept, outputs, strict=True):
            choice = output.outputs[0]
            ended += choice.finish_reason == "stop"
            error = _error(schema, choice.text) if choice.finish_reason == "stop" else None if choice.finish_reason == "length" else choice
            if error is not None:
                wrong += 1
                print(f"{json.dumps(schema)[:600]}\n    {choice.text[:300]!r}: {str(error)[:300]}")
    print(f"{args.count} schemas: {refused} refused; of {len(kept)} outputs {ended} ended by themselves; {wrong} are wrong")
    return 1 if wrong else 0


def _error(schema: Any, text: str) -> Exception | None:
    try:
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    except Exception as error:
        return error
    return None


if __name__ == "__main__":
    sys.exit(main())
