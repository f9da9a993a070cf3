"""Make tests/models/parameter_counts.json: how many parameters transformers gives the models of real configs.

Run where torch and transformers are installed (they are no dependencies of the project); no memory is taken for the weights:

    python scripts/count_parameters.py DIRECTORY

Counted are the text decoder with its head, or the encoder without heads and pooler, and the buffers that checkpoints hold. Configs that
transformers has no model for are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TABLE = Path(__file__).resolve().parent.parent / "tests" / "models" / "parameter_counts.json"
# Kimi-K2 comes with code of its own, which is DeepSeek's.
SAME = {"kimi_k2": "deepseek_v3"}
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert")


def main() -> None:
    transformers.logging.set_verbosity_error()
    root = Path(sys.argv[1])
    counts = {}
    for file in sorted(root.rglob("*.json")):
        values = json.loads(file.read_text("utf-8"))
        if isinstance(values, dict) and "model_type" in values and not file.name.endswith("generation_config.json"):
            try:
                counts[str(file.relative_to(root).with_suffix(""))] = count(values)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                print(f"{file.name}: {error!r:.100}")
    TABLE.write_text(json.dumps(counts, indent=0) + "\n", "utf-8")
    print(f"{len(counts)} configs")


def count(values: dict[str, Any]) -> int:
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    kind = SAME.get(values["model_type"], values["model_type"])
    config = transformers.CONFIG_MAPPING[kind].from_dict(values | {"model_type": kind})
    text = config.get_text_config(decoder=True)
    text.tie_word_embeddings = config.tie_word_embeddings
    with torch.device("meta"):
        if kind in ENCODERS:
            model = transformers.AutoModel.from_config(config)
        elif type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            model = transformers.AutoModelForCausalLM.from_config(text)
        else:
            model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    held = {name for name in model.state_dict() if not name.startswith("pooler.")}
    tensors = [tensor for tensors in (model.named_parameters(), model.named_buffers()) for name, tensor in tensors if name in held]
    return sum(tensor.numel() for tensor in tensors)


if __name__ == "__main__":
    main()
