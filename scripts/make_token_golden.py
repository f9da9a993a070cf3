"""Write tests/golden/default_model_tokens.json: what transformers' reading of the default model's GGUF tokenizer makes of some texts.

Run with an environment that has transformers, gguf and torch: python scripts/make_token_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxllm.weights.default_model import default_model_path

# Of digits only ASCII ones: the model's own tokenizer cuts every digit off its neighbours, transformers' GGUF reading does not cut at all,
# which shows with others (½, Arabic digits) only.
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and\ttabs\t\n\n\nand lines\r\n",
    "I'll say it's they're we've don't I'd 'tis",
    "x = 12345 + 67.89e-3  # a comment\nif x != y:\n        return {x: [y]}",
    "é naïve café Ångström straße",
    "e\u0301 decomposed, \u00a0no-break, \u200bzero width",
    "你好，世界！ こんにちは 안녕하세요",
    "Привет мир, γειά σου Κόσμε, שלום, مرحبا",
    "😀👩‍👩‍👧‍👦🇩🇪 emoji",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>text after the end",
    "https://example.com/a?b=c&d=%20#e",
    "ALLCAPS MixedCase snake_case kebab-case camelCase",
    "$100.00 (50%) [x] {y} ~z^2 `code` \\n \"quoted\" 'single'",
    "word" * 30,
    "The quick brown fox jumps over the lazy dog. " * 4,
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
]


def main() -> None:
    from transformers import AutoTokenizer

    path = default_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    golden = {
        "texts": [{"text": text, "ids": tokenizer.encode(text)} for text in TEXTS],
        "chats": [
            {"messages": chat, "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)} for chat in CHATS
        ],
    }
    out = Path(__file__).parents[1] / "tests" / "golden" / "default_model_tokens.json"
    out.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
