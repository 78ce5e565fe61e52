"""Resident memory of PPO with four SmolLM2-135M-sized models: everything in memory, against everything idle on disk.

python -m tests.benchmarks.residency [--folder FOLDER] [--ranks 1] [--steps 1]

Needs `make assets`, 7 GiB of memory and disk. The system's figure is the resident set of all ranks together, read from
/proc by a process outside, above what they have after all imports. The accounting's figure is the largest `peak_bytes`
of memory.jsonl.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

from megarlhf.config.algorithms import PPO
from megarlhf.config.layout import Layout
from megarlhf.config.residency import CriticResidency
from megarlhf.config.settings import Actor, Critic, Data, PPORun, Reward, Rollout, Run
from tests.benchmarks.report import Row, finish, scratch
from tests.distributed.pool import free_port

POLICY = Path("assets/SmolLM2-135M-Instruct")
SAMPLE_S = 0.01


def write_judge(folder: Path) -> Path:
    """A reward model of the policy's size: its weights, with a head of small random numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(POLICY / "model.safetensors")
    weights.pop("lm_head.weight", None)
    hidden_size = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = 0.01 * torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((POLICY / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    config |= {"label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    for path in POLICY.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    return folder


def settings(folder: Path, judge: Path, ranks: int, steps: int, residency: CriticResidency) -> PPORun:
    """Actor, reference and, of the same size, critic and reward model; trained in stages, sampled in whole copies."""
    return PPORun(
        actor=Actor(model=str(POLICY), train=Layout(pp=ranks), micro_batch_tokens=64),
        critic=Critic(model=str(judge), micro_batch_tokens=64),
        reward=Reward(model=str(judge), micro_batch_tokens=64),
        algorithm=PPO(num_epochs=1, num_minibatches=1),
        rollout=Rollout(batch_size=2, max_new_tokens=8),
        data=Data(prompts="assets/imdb_prompts.jsonl", max_prompt_tokens=16, too_long="truncate_right"),
        residency=residency,
        run=Run(dir=str(folder), steps=steps, sample_texts=0, tensorboard=False, overwrite=True),
    )


def rank_process(rank: int, ranks: int, port: int, connection: Connection, run_settings: PPORun) -> None:
    """One rank: imports, waits to be measured, trains."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from megarlhf import device

    torch.set_num_threads(1)
    device.prepare()
    import megarlhf.loop.online  # noqa: F401
    from megarlhf.loop.launch import run_training

    device.join_world()
    connection.send("ready")
    connection.recv()
    run_training("ppo", run_settings, rank, ranks, as_json=True)
    connection.send("done")


def resident_bytes(pid: int) -> int:
    """The resident set of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured(run_settings: PPORun, ranks: int) -> tuple[int, int, float]:
    """(system's peak above the imports, accounted peak, seconds) of one run, over all ranks."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes, connections = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        arguments = (rank, ranks, port, theirs, run_settings)
        processes.append(context.Process(target=rank_process, args=arguments))
        connections.append(ours)
        processes[-1].start()
    for connection in connections:
        connection.recv()
    pids = [process.pid for process in processes]
    baseline = peak = sum(map(resident_bytes, pids))
    start = time.perf_counter()
    for connection in connections:
        connection.send("go")
    while not all(connection.poll() for connection in connections):
        peak = max(peak, sum(map(resident_bytes, pids)))
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    rows = [json.loads(line) for line in (Path(run_settings.run.dir) / "memory.jsonl").read_text().splitlines()]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items() if name != "tenants"))
        if row["stage"] == "reshard":
            extra = row["peak_bytes"] - row["device_bytes"] - row["host_bytes"]
            print(f"reshard: {extra / 2**20 / ranks:.1f} MiB a rank beside the models and what was there before")
    return peak - baseline, max(row["peak_bytes"] for row in rows), seconds


def main() -> None:
    """The peak with everything idle on disk, as a share of the peak with everything in memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary one without it")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with scratch(options.folder) as at:
        finish(compared(at, options.ranks, options.steps), options.json)


def compared(at: Path, ranks: int, steps: int) -> list[Row]:
    """The two runs; `at` is an empty folder."""
    judge, peaks, notes = write_judge(at / "judge"), {}, []
    for name, residency in {"device": CriticResidency(), "disk": CriticResidency(idle="disk")}.items():
        peak, accounted, seconds = measured(settings(at / name, judge, ranks, steps, residency), ranks)
        peaks[name] = peak
        notes.append(
            f"idle {name}: peak {peak / 2**30:.2f} GiB above imports, accounted {accounted / 2**30:.2f} "
            f"({accounted / peak - 1:+.1%}), {seconds:.0f} s"
        )
    name = f"PPO of four 135M models, {ranks} ranks: peak memory, idle on disk"
    return [Row(name, peaks["disk"] / peaks["device"], "x idle in memory", note="; ".join(notes))]


if __name__ == "__main__":
    main()
