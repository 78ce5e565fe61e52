"""Time and peak memory of converting a synthetic model both ways, against cp and against transformers.

python -m tests.benchmarks.conversion [--folder FOLDER] [--size 7b] [--workers 2]

The rivals: cp and fsync of the same files, and loading plus saving with transformers. Memory is anonymous: the page
cache is not counted, as it is given back when somebody needs it. Of a small model's it is mostly two interpreters that
have imported torch, 190 MiB each: this command, and the one that its workers are forked from.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megarlhf.weights.safetensors_file import header_of, shards
from tests.benchmarks.report import Row, finish, scratch
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
    """Memory that is not page cache, of a process and all that it started; what forks share counts once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))
    return total


@dataclass(frozen=True)
class Cost:
    """What a command took."""

    seconds: float
    peak_bytes: int
    """Anonymous memory of it and all that it started."""
    is_cold: bool
    """The files had to be read from the disk."""


def measured(words: Sequence[str]) -> Cost:
    """Run a command from a cold cache."""
    is_cold = is_cache_dropped()
    start = time.perf_counter()
    process = psutil.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, is_done = [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.05):
            try:
                peak[0] = max(peak[0], anonymous_bytes(process))
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - start
    is_done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{errors.decode()[-2000:]}")
    return Cost(seconds, peak[0], is_cold)


_TRANSFORMERS = (
    "import sys; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2], max_shard_size='4GB')"
)


def rows(name: str, cost: Cost, copy: Cost, rival: Cost, gib: float) -> list[Row]:
    """Time against both rivals, and memory."""
    note = f"{cost.seconds / gib:.1f} s a GiB; cp and fsync {copy.seconds / gib:.1f}, "
    note += f"transformers {rival.seconds / gib:.1f}" + ("" if cost.is_cold else "; warm cache")
    unit = "x transformers' load and save"
    memory = f"{cost.peak_bytes / 2**20:.0f} against {rival.peak_bytes / 2**20:.0f} MiB"
    return [
        Row(f"{name}, time", cost.seconds / rival.seconds, unit, "<= 1.0", note),
        Row(f"{name}, time against cp", cost.seconds / copy.seconds, "x cp and fsync"),
        Row(f"{name}, peak memory", cost.peak_bytes / 2**20 / gib, "MiB a GiB", note=memory),
    ]


def main() -> None:
    """Write, copy, load and save, convert there and back, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where there is room for two models; a temporary one without it")
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with scratch(given.folder) as at:
        finish(compared(at, given.size, given.workers), given.json)


def compared(at: Path, size: str, workers: str) -> list[Row]:
    """All rows; `at` is an empty folder."""
    source, copied, there, back = at / "hf", at / "copy", at / "megatron", at / "back"
    tool, options = [sys.executable, "-m"], ["--workers", workers, "--without-tokenizer"]
    gib = write_model(source, size) / 2**30
    copy = measured(["sh", "-c", f'cp -r "{source}" "{copied}" && sync "{copied}"/*'])
    shutil.rmtree(copied)
    rival = measured(
        ["sh", "-c", f'"$0" -c "$1" "{source}" "{copied}" && sync "{copied}"/*', sys.executable, _TRANSFORMERS]
    )
    shutil.rmtree(copied)
    found = []
    for layout in ([], ["--tp", "4", "--pp", "2"]):
        shutil.rmtree(there, ignore_errors=True)
        words = [*tool, "checkpoints_tools.hf_to_megatron", str(source), str(there), *layout, *options]
        name = " ".join([f"{size} ({gib:.2f} GiB) to Megatron", *layout])
        found += rows(name, measured(words), copy, rival, gib)
    before = _fingerprint(source)
    shutil.rmtree(source)
    words = [*tool, "checkpoints_tools.megatron_to_hf", str(there), str(back), *options]
    found += rows(f"{size} ({gib:.2f} GiB) to Hugging Face", measured(words), copy, rival, gib)
    differs = _fingerprint(back) != before
    return [*found, Row(f"{size}, tensors that differ after both", int(differs), "of one fingerprint", "<= 0")]


def _fingerprint(folder: Path) -> str:
    words = [sys.executable, "-m", "checkpoints_tools.inspect", "--fingerprint", "--json", str(folder)]
    return json.loads(subprocess.check_output(words))["fingerprint"]


if __name__ == "__main__":
    main()
