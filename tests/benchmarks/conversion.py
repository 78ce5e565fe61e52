"""Time and peak anonymous memory of converting a synthetic model both ways, against copying the same bytes.

python -m tests.benchmarks.conversion FOLDER [--layers 12] [--workers 1]     (needs four times the model's size of disk)
"""

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megarlhf.config.layout import Layout
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.report import compare
from megarlhf.weights.safetensors_file import write_safetensors
from megarlhf.weights.source import open_source
from tests.tiny import tiny_config, tiny_shapes


def write_model(folder: Path, layers: int) -> int:
    """A random bfloat16 Llama of hidden size 2048, written tensor by tensor; returns its bytes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    config = tiny_config(**sizes, head_dim=64, num_hidden_layers=layers, vocab_size=32000, torch_dtype="bfloat16")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tiny_shapes(config)
    wanted = [(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    write_safetensors(folder / "model.safetensors", wanted, lambda name: torch.randn(shapes[name]))
    return (folder / "model.safetensors").stat().st_size


def anonymous_bytes() -> int:
    """This process's resident memory that is not page cache."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measured(name: str, action: Callable[[], object]) -> None:
    """Run an action; print its seconds and by how much anonymous memory rose above where it began."""
    before, peak, is_done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    print(
        f"{name:24} {seconds:7.2f} s   peak {max(peak[0] - before, 0) / 2**20:7.1f} MiB above {before / 2**20:.0f} MiB"
    )


def copy(source: Path, target: Path) -> None:
    """cp and fsync."""
    shutil.copyfile(source, target)
    with target.open("rb") as written:
        os.fsync(written.fileno())


def main() -> None:
    """Write, copy, convert there and back, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    at = given.folder / "conversion_benchmark"
    try:
        print(f"{write_model(at / 'hf', given.layers) / 2**20:.0f} MiB")
        measured("cp and fsync", lambda: copy(at / "hf/model.safetensors", at / "copy"))
        for layout in (Layout(), Layout(tp=2, pp=2)):
            target = at / f"tp{layout.tp}pp{layout.pp}"
            name = f"to Megatron tp{layout.tp} pp{layout.pp}"
            measured(name, lambda: write_megatron(at / "hf", target, layout, workers=given.workers))  # noqa: B023
        measured("to Hugging Face", lambda: write_hugging_face(target, at / "back", workers=given.workers))
        differences = compare(open_source(at / "hf"), open_source(at / "back"))
        print(differences or "every bit of every tensor is the same")
    finally:
        shutil.rmtree(at, ignore_errors=True)


if __name__ == "__main__":
    main()
