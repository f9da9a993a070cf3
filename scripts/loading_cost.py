"""What loading a checkpoint costs in memory and time, against a plain read of its files.

    python scripts/loading_cost.py [--layers 32] [--folder DIR] [--rounds 2]

Writes a sharded bfloat16 checkpoint of the shape of Llama-3.1-8B (16.1 GB; 3.0 GB with --layers 2), then takes turns of reading its files
into one buffer and of loading them in bfloat16, each in a process of its own and with the files dropped from the page cache before. Printed
are the most memory that the loading process had beside file pages that the system may drop (RssAnon + RssShmem), the most with those
(VmHWM), both over the size of the checkpoint, and the seconds of both. Loading ends when every page of every weight has been read again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SHARD_BYTES = 5 * 10**9
BUFFER_BYTES = 16 * 2**20


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the order in which checkpoints have them."""
    width, mlp, kv, vocab = 4096, 14336, 1024, 128256
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        found |= {f"{layer}input_layernorm.weight": (width,), f"{layer}post_attention_layernorm.weight": (width,)}
        found |= {f"{layer}mlp.{name}_proj.weight": (mlp, width) for name in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": (width, mlp)}
        found |= {f"{layer}self_attn.{name}_proj.weight": (rows, width) for name, rows in zip("kvqo", (kv, kv, width, width), strict=True)}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def write(folder: Path, layers: int) -> int:
    """Write the checkpoint; returns its bytes."""
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes(layers).items()}
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(name)
    # Values around 0.01, whatever comes after; not zeros, which file systems may leave out.
    block = np.random.default_rng(0).integers(0x3C00, 0x3C80, BUFFER_BYTES // 2, np.uint16).tobytes()
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, start = {}, 0
        for name in names:
            header[name] = {"dtype": "BF16", "shape": shapes(layers)[name], "data_offsets": [start, start + sizes[name]]}
            start, weight_map[name] = start + sizes[name], file
        text = json.dumps(header).encode()
        # As in most files, no weight lies where a CPU array may (at a multiple of 64 bytes).
        text += b" " * (-len(text) % 64)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for at in range(0, start, len(block)):
                out.write(block[: start - at])
            out.flush()
            os.fsync(out.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": layers}))
    return sum(sizes.values())


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> dict[str, float]:
    """Seconds of a plain read."""
    buffer, started = bytearray(BUFFER_BYTES), time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return {"seconds": time.perf_counter() - started}


def load(folder: Path) -> dict[str, float]:
    """Seconds and memory of loading."""
    import jax

    from jaxllm.launch import load as load_weights
    from jaxllm.models.build import define_model
    from jaxllm.runner.mesh import Placement, make_mesh
    from jaxllm.weights.hf import open_checkpoint

    model, placement = define_model(json.loads((folder / "config.json").read_text()), dtype="bfloat16"), Placement(make_mesh(1))
    before = _status()
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            status = _status()
            peak = max(peak, status["RssAnon"] + status["RssShmem"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    params = jax.block_until_ready(load_weights(model, open_checkpoint(folder), placement, seed=0))
    loaded = time.perf_counter() - started
    for array in params:
        np.asarray(array).reshape(-1).view(np.uint16)[::2048].max()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    return {"seconds": seconds, "loaded": loaded, "before": before["RssAnon"], "anonymous": peak, "all": _status()["VmHWM"]}


def _status() -> dict[str, int]:
    """Memory of this process in bytes, by the names of /proc."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder where none is given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", choices=("read", "load"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps({"read": read, "load": load}[args.part](args.folder)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        size = write(Path(name), args.layers)
        print(f"checkpoint: {size / 1e9:.2f} GB")
        for _ in range(args.rounds):
            for part in ("read", "load"):
                forget(Path(name))
                command = [sys.executable, __file__, "--part", part, "--folder", name]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                line = f"{part}: {found['seconds']:.1f} s, {size / 1e9 / found['seconds']:.2f} GB/s"
                if part == "load":
                    line += f" ({found['loaded']:.1f} s until loaded); memory over size: {found['anonymous'] / size:.3f}"
                    line += f" (anonymous), {found['all'] / size:.3f} (with file pages); {found['before'] / 1e9:.2f} GB before"
                print(line, flush=True)


if __name__ == "__main__":
    main()
