"""The planner's times of a step beside measured ones, on this machine, whose peaks a short probe measures.

    python -m tests.benchmarks.step_time [--rounds 3]     (needs `make assets`)

First the stages of GRPO steps with a reference of SmolLM2-135M (float32, 12 responses of 56 tokens, each at its
longest as the planner assumes, two updates a step), one process of one thread; then one update of the 12-layer model of
`parallel` in one process and over two, by tp, pp and dp. The planner is asked about a "GPU" that multiplies as fast as
a product of the models' own shapes does in one thread here (with two processes at work, in both at once), reads memory
as fast as one thread, and sends as fast as two processes sum through memory that they share. One number is fitted: the
share of these peaks that work reaches (`Efficiency`, for multiplications and memory alike), so that the update of one
process comes out right; links are taken at their peak. A figure is measured time / predicted time: 1 is a planner
that is right.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.loop.planner.gpus import GPU, GPUS, Efficiency
from tests.benchmarks import parallel
from tests.benchmarks.report import Row, finish
from tests.distributed.pool import close_pools, run_on_ranks

MODEL = "assets/SmolLM2-135M-Instruct"
PROMPT_TOKENS, NEW_TOKENS, PROMPTS, SAMPLES = 8, 56, 6, 2
LAYOUTS = (parallel.ONE, "tp2", "pp2", "dp2")
PEAK = Efficiency(1.0, 1.0, 1.0)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device.prepare()
    alone, both = this_machine(1), this_machine(2)
    updates = measured_updates(options.rounds)
    close_pools()
    stages = measured_stages(options.rounds)
    share = predicted_update(alone, PEAK, parallel.ONE) / updates[parallel.ONE]
    fitted = Efficiency(compute=share, memory=share, links=1.0)
    note = (
        f"peaks {alone.flops / 1e9:.0f} GFLOP/s and {alone.memory_bandwidth / 1e9:.1f} GB/s of memory in one process, "
        f"{both.flops / 1e9:.0f} and {both.memory_bandwidth / 1e9:.1f} in each of two, {both.node_bandwidth / 1e9:.2f} "
        "GB/s between them"
    )
    rows = [Row("share of the peaks, fitted to an update of one process", share, "of 1", note=note)]
    for name, seconds in stages.items():
        rows.append(_row(f"GRPO of 135M, {name}", seconds, predicted_stages(alone, fitted)[name]))
    for name, seconds in updates.items():
        machine = alone if name == parallel.ONE else both
        rows.append(_row(f"update of 12 layers, {name}", seconds, predicted_update(machine, fitted, name)))
    finish(rows, options.json)


def _row(name: str, measured: float, predicted: float) -> Row:
    note = f"{measured:.3g} s, predicted {predicted:.3g} s"
    return Row(name, measured / predicted, "x predicted", note=note)


def this_machine(ranks: int) -> GPU:
    """The planner's `cpu` with what this machine does in `ranks` processes of one thread at once: they share memory."""
    flops, bandwidth, sending = (min(found) for found in zip(*run_on_ranks(ranks, peaks), strict=True))
    return replace(
        GPUS["cpu"], flops=flops, float32_flops=flops, memory_bandwidth=bandwidth, node_bandwidth=sending,
        network_bandwidth=sending, gpus_per_node=8,
    )  # fmt: skip


def peaks(rank: int, world_size: int) -> tuple[float, float, float]:
    """Multiplications and additions, bytes read, and bytes sent in an all-reduce, each a second (collective over the
    world, so that all ranks are at it at once)."""
    from megarlhf.parallel.parts import carry

    a, b, numbers, message = torch.randn(256, 768), torch.randn(2048, 768), torch.ones(2**26), torch.zeros(2**20)
    world = dist.group.WORLD
    carry(world)
    dist.barrier()
    flops = 2 * 256 * 768 * 2048 / _fastest(lambda: torch.nn.functional.linear(a, b))
    bandwidth = numbers.nbytes / _fastest(lambda: numbers.sum())
    # a ring of two sends as many bytes as it sums; one rank alone sends nothing
    return flops, bandwidth, message.nbytes / _fastest(lambda: dist.all_reduce(message, group=world))


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measured_updates(rounds: int) -> dict[str, float]:
    """Seconds of an update of the 12-layer model by layout."""
    with TemporaryDirectory() as folder:
        parallel.write_config(Path(folder), _CASE.vocabulary)
        for name in LAYOUTS:
            run_on_ranks(parallel.ranks(name), parallel.parallel_ranks.hold, name, parallel.case(name, folder, _CASE))
        found = [{name: parallel.one_update(name).seconds for name in LAYOUTS} for _ in range(rounds + 1)][1:]
    return {name: median(each[name] for each in found) for name in LAYOUTS}


_CASE = argparse.Namespace(rows=8, prompt=64, response=192, first_stage_layers=8, vocabulary=32000)
"""As the benchmark `parallel` has it."""


def predicted_update(gpu: GPU, efficiency: Efficiency, name: str) -> float:
    """The planner's seconds for one of `measured_updates`."""
    from megarlhf.loop.planner.models import PlannedModel
    from megarlhf.loop.planner.sizes import model_bytes
    from megarlhf.loop.planner.step_time import Machine, learn_s
    from megarlhf.loop.planner.workload import Workload
    from megarlhf.models.architecture import Architecture
    from megarlhf.parallel.grid import Coordinates

    with TemporaryDirectory() as folder:
        parallel.write_config(Path(folder), _CASE.vocabulary)
        case, world_size = parallel.case(name, folder, _CASE), parallel.ranks(name)
        model = PlannedModel(
            name="actor",
            folder=folder,
            architecture=Architecture.from_folder(folder),
            layout=case.layout,
            head="vocabulary",
            dtype="float32",
            setting="actor.train",
            is_trained=True,
            micro_batch_tokens=case.micro_batch_tokens,
        )
    work = Workload(rows=_CASE.rows, prompt=_CASE.prompt, response=_CASE.response, num_prompts=_CASE.rows)
    size = model_bytes(model, Coordinates(tp=0, pp=0, dp=0), case.layout.dp(world_size))
    return learn_s(model, size, work, Machine(gpu, efficiency, world_size)).total


def grpo_settings(folder: str, steps: int):
    """Every prompt and every response at its longest."""
    from megarlhf.config.algorithms import GRPO
    from megarlhf.config.runs import GRPORun
    from megarlhf.config.settings import Actor, Data, Reward, Rollout, Run

    return GRPORun(
        actor=Actor(model=MODEL, micro_batch_tokens=512),
        reward=Reward(functions=("sentiment",)),
        algorithm=GRPO(kl_coef=0.01, num_minibatches=2),
        rollout=Rollout(
            batch_size=PROMPTS, samples_per_prompt=SAMPLES, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        ),
        data=Data(prompts="assets/imdb_prompts.jsonl", max_prompt_tokens=PROMPT_TOKENS, too_long="truncate_right"),
        run=Run(dir=f"{folder}/run", steps=steps),
    )


def measured_stages(rounds: int) -> dict[str, float]:
    """Seconds of the stages of a GRPO step that the planner estimates, in this process and one thread."""
    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.config.filled import filled
    from megarlhf.loop.loop import train
    from megarlhf.loop.online import build_online
    from megarlhf.loop.reporting import reporter

    device.join_world()
    torch.set_num_threads(1)
    found: list[dict[str, float]] = []
    with TemporaryDirectory() as folder:
        settings = filled(grpo_settings(folder, rounds + 1))
        Path(settings.run.dir).mkdir()
        with reporter(settings, 0, as_json=True) as report:
            run = build_online(settings, ALGORITHMS["grpo"], 1, report)
            train(run, 0, lambda done, numbers: found.append(dict(numbers)))
    names = predicted_stages(GPUS["cpu"], PEAK)
    return {name: median(step[f"time/{name}_s"] for step in found[1:]) for name in names}


def predicted_stages(gpu: GPU, efficiency: Efficiency) -> dict[str, float]:
    """The planner's seconds for each stage of the same step."""
    from megarlhf.loop.planner.plan import Question, make_plan, stage_s
    from megarlhf.loop.planner.stages import Ranks

    with TemporaryDirectory() as folder:
        settings = grpo_settings(folder, 1)
        plan = make_plan(Question("grpo", settings, 1, gpu, 1e3, Path(folder)))
    assert not plan.violations, plan.violations
    ranks = Ranks(settings, plan.cast.models, plan.work, 1, gpu)
    found = {stage.name: stage_s(ranks, stage.name, plan.reshard, efficiency).total for stage in plan.stages}
    return {name: seconds for name, seconds in found.items() if seconds}


if __name__ == "__main__":
    main()
