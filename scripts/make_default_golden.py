"""Make tests/golden/default_model.npz: what transformers makes of the default model, greedy tokens and top-5 log-probabilities.

Run where torch, transformers and gguf are installed (they are no dependencies of the project), with the model's GGUF file:

    python scripts/make_default_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

Sums in float32 differ between libraries, so two tokens that are nearly equally likely may change places. A continuation therefore ends
before the first step at which the best token leads the second by less than MIN_LEAD; every token that is stored is a clear one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

OUT = Path(__file__).resolve().parents[1] / "tests" / "golden" / "default_model.npz"
NUM_STEPS = 32
NUM_TOP = 5
# In log-probability: far above what rounding comes to.
MIN_LEAD = 1e-3

_HARBOUR = """The ferry to the island leaves at ten past six, before the bakery opens and after the last of the fishing boats has gone out.
Marit, who has sold tickets there for thirty-one years, knows every passenger by the sound of their boots on the gangway. She keeps a
ledger of the weather beside the till, because the company's own records were lost when the old harbour office flooded, and because, as
she says, somebody ought to remember which winters froze and which ones only pretended to."""
_BREAD = """To make the dough, mix 500 grams of flour with 350 grams of lukewarm water and let it rest for half an hour. Add ten grams of
salt and a spoonful of active starter, fold it four times over two hours, and leave it in a cool place overnight. In the morning, heat the
oven to 240 degrees with an iron pot inside, shape the loaf, cut its top, and bake it covered for twenty-five minutes and open for twenty
more. The loaf is done when it sounds hollow if you knock on its base."""
_RIVER = """Rivers carry more than water. Every year the delta grows by a strip of mud as wide as a street, and the maps that are drawn in
spring are wrong by autumn. Engineers first tried to hold the channel with stone; later they learned that a river which may move a little
does less harm than one that may not move at all. The reed beds that returned now clean the water that the town drinks, and the herons,
which nobody had planned for, came back by themselves."""
_MEETING = """Minutes of the meeting, item 4. The committee looked at three offers for the new roof. The first is the cheapest but covers
only the south side. The second includes insulation and takes six weeks. The third can start in May, costs twelve percent more than the
second, and comes with a guarantee of twenty years. Mr Okafor asked whether the solar panels could be kept; the builder said yes, if they
are taken down and put back by the firm that installed them. The vote was postponed to the next meeting."""
_CODE = '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that touch or overlap; the result is sorted."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class Counter:
    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        self.values[name] = self.values.get(name, 0) + by

    def most_common(self, n: int) -> list[tuple[str, int]]:
        return sorted(self.values.items(), key=lambda item: -item[1])[:n]
'''
_SQL = """CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL, total NUMERIC, placed_on DATE);
INSERT INTO orders VALUES (1, 'Ines', 24.50, '2021-03-04'), (2, 'Tomas', 99.90, '2021-03-07'), (3, 'Ines', 12.00, '2021-04-01');
-- Total of each customer, largest first
SELECT customer,"""
_JSON = """{"stations": [{"id": "A1", "name": "North Gate", "lines": [1, 4], "lift": true},
{"id": "A2", "name": "Old Market", "lines": [1], "lift": false}, {"id": "B7", "name": "Museum", "lines": [2, 4],"""
_LIST = """Things to pack for three days in the mountains:
1. A tent and a sleeping bag
2. Rain jacket and warm socks
3. Map, compass and a charged lamp
4."""
_GERMAN = """Der Zug nach Hamburg fährt heute von Gleis neun ab, nicht von Gleis vier. Wegen der Bauarbeiten dauert die Reise etwa vierzig
Minuten länger als sonst. Fahrgäste, die weiter nach Kiel wollen,"""
_FRENCH = """Chaque été, ma grand-mère ouvrait la maison près de la mer. Elle rangeait les draps, cueillait des figues et attendait que les
enfants arrivent. Le soir,"""
_SPANISH = "La biblioteca del barrio abre de lunes a viernes. Los sábados,"
_MIXED = (
    "東京は日本の首都です。 Москва — столица России. القاهرة عاصمة مصر. Αθήνα είναι η πρωτεύουσα της Ελλάδας. 🌍 The capital of France is"
)

_PARAGRAPHS = (_HARBOUR, _BREAD, _RIVER, _MEETING)


def _long(count: int, numbered: bool = False) -> str:
    """`count` of the paragraphs in an order of their own, each with a heading that differs."""
    parts = []
    for i in range(count):
        body = _PARAGRAPHS[(i * 3 + i // 4) % len(_PARAGRAPHS)].replace("\n", " ")
        heading = f"Chapter {i + 1}" if numbered else f"Notebook page {7 * i + 3}, copied on day {i + 1}"
        parts.append(f"{heading}\n\n{body}\n\n")
    return "".join(parts)


def _table(rows: int) -> str:
    lines = ["| week | visitors | rain in mm | note |", "|---|---|---|---|"]
    lines += [
        f"| {i + 1} | {137 + (i * 53) % 211} | {(i * 17) % 29}.{i % 10} | {'closed' if i % 6 == 5 else 'open'} |" for i in range(rows)
    ]
    return "\n".join(lines) + "\n"


# A string is completed as it stands; a tuple holds the turns of a conversation, the user's first.
PROMPTS: tuple[str | tuple[str, ...], ...] = (
    "The three primary colours of paint are red, blue and",
    _SPANISH,
    _LIST,
    _JSON,
    _FRENCH,
    _GERMAN,
    _MIXED,
    _SQL,
    _CODE + "\n\ndef overlaps(a: tuple[int, int], b: tuple[int, int]) -> bool:\n",
    ("What is the capital of Norway?",),
    ("Write a short poem about a lighthouse.",),
    ("Please answer with one word: is ice lighter than water?", "Yes.", "Why does it float, then? Explain it to a child."),
    ("Find the mistake in this function and explain it.\n\n```python\ndef mean(xs):\n    return sum(xs) / len(xs) + 1\n```",),
    ("Summarise the following minutes in two sentences.\n\n" + _MEETING,),
    (f"Here is a recipe.\n\n{_BREAD}\n\nHow long is the loaf in the oven altogether?",),
    _table(24) + "\nIn the table above, the park was closed in weeks",
    _long(3) + "Marit",
    _long(6, numbered=True) + "Chapter 7\n\n",
    ("Which of these pages speaks about herons?\n\n" + _long(9),),
    _long(13, numbered=True) + "To sum up, the thirteen chapters",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tests/golden/default_model.npz with transformers, in float32.")
    parser.add_argument("gguf", type=Path, help="the default model's file")
    path = parser.parse_args().gguf
    torch.set_grad_enabled(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(_encoded(tokenizer.encode, tokenizer.apply_chat_template)):
        tokens, top_ids, top_logprobs = greedy(model, prompt)
        arrays |= {f"prompt_{i}": np.array(prompt, np.uint16), f"tokens_{i}": tokens, f"ids_{i}": top_ids, f"logprobs_{i}": top_logprobs}
        print(f"{i}: {len(prompt)} + {len(tokens)} tokens, {tokenizer.decode(tokens)!r}")
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.stat().st_size} bytes")


def _encoded(encode: Callable[..., list[int]], template: Callable[..., str]) -> Iterator[list[int]]:
    for prompt in PROMPTS:
        if isinstance(prompt, tuple):
            turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(prompt)]
            yield encode(template(turns, tokenize=False, add_generation_prompt=True))
        else:
            yield encode(prompt)


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens [n], and of each step the NUM_TOP best ids and their log-probabilities [n, NUM_TOP], best first; n is at most NUM_STEPS."""
    tokens, top_ids, top_logprobs = [], [], []
    cache, given = None, torch.tensor([prompt])
    for _ in range(NUM_STEPS):
        out = model(given, cache=cache, use_cache=True, logits_to_keep=1)
        cache = out.cache
        best = torch.log_softmax(out.logits[0, -1], -1).topk(NUM_TOP)
        if float(best.values[0] - best.values[1]) < MIN_LEAD:
            break
        tokens.append(int(best.indices[0]))
        top_ids.append(best.indices.numpy())
        top_logprobs.append(best.values.numpy())
        given = torch.tensor([tokens[-1:]])
    return np.array(tokens, np.uint16), np.array(top_ids, np.uint16), np.array(top_logprobs, np.float32)


if __name__ == "__main__":
    main()
