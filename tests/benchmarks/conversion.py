"""Time and peak anonymous memory of converting a synthetic model both ways, against cp and fsync of the same files.

python -m tests.benchmarks.conversion FOLDER [--size 7b] [--workers 2]

The page cache is dropped before every stage (as root; otherwise the times are of a warm cache, and say so). Each stage
is deleted as soon as the next one does not need it: twice the model's size of disk is in use at most.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from megarlhf.weights.safetensors_file import header_of, shards
from tests.tiny import tiny_config, tiny_shapes

SIZES = {
    "0.5b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10, "num_key_value_heads": 4},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32},
}
_SHARD_BYTES = 4 * 2**30
_POOL = 2**24


def write_model(folder: Path, size: str) -> int:
    """A random bfloat16 Llama in several shards, written tensor by tensor; returns its bytes."""
    fields = SIZES[size] | {"num_attention_heads": 32, "head_dim": SIZES[size]["hidden_size"] // 32}
    config = tiny_config(**fields, vocab_size=32000, torch_dtype="bfloat16")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tiny_shapes(config)
    sizes = {name: torch.Size(shape).numel() * 2 for name, shape in shapes.items()}
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).bfloat16()
    files = shards(sizes, _SHARD_BYTES)
    for file, names in files.items():
        with (folder / file).open("wb") as stream:
            stream.write(header_of([(name, shapes[name], torch.bfloat16) for name in names]))
            for name in names:
                _write_random(stream, pool, sizes[name] // 2)
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(sizes.values())


def _write_random(stream, pool: torch.Tensor, count: int) -> None:
    """`count` numbers from a random place of the pool on, so that no two tensors are alike."""
    start = int(torch.randint(_POOL, ()))
    while count:
        part = pool[start : start + count]
        stream.write(memoryview(part.view(torch.uint8).numpy()))
        count, start = count - len(part), 0


def is_cache_dropped() -> bool:
    """Write back and forget all cached pages, where that is allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def anonymous_bytes(process: psutil.Process) -> int:
    """Resident memory that is not page cache, of a process and all that it started."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{one.pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return total


def measured(name: str, words: list[str]) -> float:
    """Run a command from a cold cache; print its seconds and its peak anonymous memory. Returns the seconds."""
    is_cold = is_cache_dropped()
    start = time.perf_counter()
    process = psutil.Popen(words, stdout=subprocess.DEVNULL)
    peak, is_done = [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.02):
            try:
                peak[0] = max(peak[0], anonymous_bytes(process))
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    if code:
        raise SystemExit(f"{' '.join(words)}: exit code {code}")
    note = "" if is_cold else "   (warm cache)"
    print(f"{name:22} {seconds:7.2f} s   peak {peak[0] / 2**20:7.1f} MiB anonymous{note}", flush=True)
    return seconds


def main() -> None:
    """Write, copy, convert there and back, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--workers", default="2")
    given = parser.parse_args()
    at = given.folder / "conversion_benchmark"
    tool = [sys.executable, "-m"]
    source, copied, back = at / "hf", at / "copy", at / "back"
    there = at / "megatron"
    workers = ["--workers", given.workers, "--without-tokenizer"]
    try:
        print(f"{given.size}: {write_model(source, given.size) / 2**30:.2f} GiB", flush=True)
        copy = ["sh", "-c", f'cp -r "{source}" "{copied}" && sync "{copied}"/*']
        base = measured("cp and fsync", copy)
        shutil.rmtree(copied)
        for layout in ([], ["--tp", "4", "--pp", "2"]):
            shutil.rmtree(there, ignore_errors=True)
            words = [*tool, "checkpoints_tools.hf_to_megatron", str(source), str(there), *layout, *workers]
            seconds = measured(" ".join(["to Megatron", *layout]), words)
            print(f"{'':22} {seconds / base:7.2f} times cp", flush=True)
        fingerprint = [*tool, "checkpoints_tools.inspect", "--fingerprint", "--json"]
        before = json.loads(subprocess.check_output([*fingerprint, str(source)]))["fingerprint"]
        shutil.rmtree(source)
        words = [*tool, "checkpoints_tools.megatron_to_hf", str(there), str(back), *workers]
        print(f"{'':22} {measured('to Hugging Face', words) / base:7.2f} times cp", flush=True)
        shutil.rmtree(there)
        after = json.loads(subprocess.check_output([*fingerprint, str(back)]))["fingerprint"]
        print("every bit of every tensor is the same" if before == after else "THE TENSORS DIFFER")
    finally:
        shutil.rmtree(at, ignore_errors=True)


if __name__ == "__main__":
    main()
