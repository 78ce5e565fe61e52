"""Whole GRPO steps, ours and TRL's: wall time of a step in turn in one process, and peak memory each in its own.

    python -m tests.benchmarks.iteration [--prompts 4 --new 64 --threads 2 --steps 5]     (needs `make assets`)

Both sides train SmolLM2-135M in float32 on the same prompts in the same order (film reviews cut at lengths spread
evenly over 8 to 64 tokens in every batch, as in rollout.py, 2 responses each), with the same reward (sentiment),
natural stops within --new tokens, temperature 1, no KL penalty, one AdamW step a batch at learning rate 1e-6. What they
sample differs as random numbers do; tokens per step are told. TRL runs its GRPOTrainer as it is (transformers.generate
on one padded batch, 8 rows at once when it learns, no gradient checkpointing, nothing saved); ours is `megarlhf
grpo` on one rank, sampling from the training weights (residency.generator view), with micro-batches of at most the
tokens of TRL's 8 padded rows, and with its metrics, samples and tensorboard files. One more step of ours is profiled:
what is neither forward, backward, optimizer, sampling nor communication is the framework's own time.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from megarlhf import device
from megarlhf.telemetry.costs import StageCosts, top_costs
from tests.benchmarks.report import Row, finish
from tests.benchmarks.rounds import peak_bytes, peaks, spread

MODEL = "assets/SmolLM2-135M-Instruct"
TEXTS = Path("assets/imdb_demonstrations.jsonl")
_TEXTS_A_PROMPT = 6
LEARNING_RATE = 1e-6
SAMPLES = 2
SHORTEST, LONGEST = 8, 64
ROWS_AT_ONCE = 8
"""TRL's default."""


def prompts(options: argparse.Namespace) -> list[str]:
    """Texts for all steps. The lengths in tokens of those of one step are spread evenly, and not in order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line) for line in TEXTS.read_text().splitlines()]
    texts = [row["prompt"] + row["response"] for row in rows] * 2
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(options.steps + 2):
        lengths = torch.linspace(SHORTEST, LONGEST, options.prompts).round().int()
        for length in lengths[torch.randperm(options.prompts, generator=random)].tolist():
            at = len(found) % len(rows)
            ids = tokenizer(" ".join(texts[at : at + _TEXTS_A_PROMPT])).input_ids[:length]
            assert len(ids) == length, "the texts are long enough"
            found.append(tokenizer.decode(ids))
    return found


def settings(options: argparse.Namespace, folder: str):
    """Of `megarlhf grpo`."""
    from megarlhf.config.algorithms import GRPO
    from megarlhf.config.residency import Residency
    from megarlhf.config.runs import GRPORun
    from megarlhf.config.settings import Actor, Data, Optimizer, Reward, Rollout, Run

    used = Path(folder) / "prompts.jsonl"
    used.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts(options)))
    return GRPORun(
        actor=Actor(
            model=MODEL,
            optimizer=Optimizer(learning_rate=LEARNING_RATE, beta2=0.999),
            micro_batch_tokens=ROWS_AT_ONCE * (LONGEST + options.new),
        ),
        reward=Reward(functions=("sentiment",)),
        algorithm=GRPO(kl_coef=0.0, loss_mean="token"),
        rollout=Rollout(batch_size=options.prompts, samples_per_prompt=SAMPLES, max_new_tokens=options.new),
        data=Data(prompts=str(used), shuffle=False),
        residency=Residency(generator="view"),
        run=Run(dir=f"{folder}/run", steps=options.steps + 2, profile=(options.steps + 2,)),
    )


@contextmanager
def our_run(options: argparse.Namespace) -> Iterator:
    """A run on one rank, with everything that `megarlhf grpo` writes. (The command samples texts to show before it
    begins, and exports the model at the end: that is not part of a step.)"""
    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.config.filled import filled
    from megarlhf.loop.online import build_online
    from megarlhf.loop.reporting import reporter

    with tempfile.TemporaryDirectory() as folder:
        wanted = filled(settings(options, folder))
        Path(wanted.run.dir).mkdir()
        with reporter(wanted, 0, as_json=True) as report:
            yield build_online(wanted, ALGORITHMS["grpo"], 1, report)


def our_step(run, step: int) -> int:
    """Step number `step` of a run; returns how many tokens were sampled."""
    from megarlhf.loop.loop import train

    found: list[float] = []
    run.num_steps = step + 1
    train(run, step, lambda done, numbers: found.append(numbers["rollout/length_avg"]))
    return round(found[0] * run.settings.rollout.batch_size * SAMPLES)


def trl_trainer(options: argparse.Namespace):
    """TRL's side, see `trl_updates.trainer`."""
    from megarlhf.rewards.builtin import sentiment
    from tests.benchmarks.trl_updates import trainer

    def reward(prompts, completions, **rest):
        return sentiment(prompts, completions, [{} for _ in prompts])

    rows = options.prompts * SAMPLES
    at_once = min(rows, ROWS_AT_ONCE)
    return trainer(
        at_once,
        options.new,
        reward,
        prompts(options),
        num_generations=SAMPLES,
        gradient_accumulation_steps=rows // at_once,
        max_steps=options.steps + 1,
    )


def measured(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[int]], list[dict]]:
    """Seconds and sampled tokens of each step that counts, and the costs of one more of ours. Ours takes its steps
    between TRL's, which take theirs in one call of `train`."""
    from transformers import TrainerCallback

    seconds: dict[str, list[float]] = {"ours": [], "TRL": []}
    tokens: dict[str, list[int]] = {"ours": [], "TRL": []}
    with our_run(options) as run:

        class InTurn(TrainerCallback):
            since = time.perf_counter()

            def on_train_begin(self, arguments, state, control, **rest):
                self.since = time.perf_counter()

            def on_step_end(self, arguments, state, control, **rest):
                seconds["TRL"].append(time.perf_counter() - self.since)
                mean_length = peer._metrics["train"]["completions/mean_length"][-1]
                tokens["TRL"].append(round(mean_length * options.prompts * SAMPLES))
                start = time.perf_counter()
                tokens["ours"].append(our_step(run, state.global_step - 1))
                seconds["ours"].append(time.perf_counter() - start)
                self.since = time.perf_counter()

        peer = trl_trainer(options)
        peer.add_callback(InTurn())
        peer.train()
        our_step(run, options.steps + 1)
        costs = json.loads((run.folder / f"profile/step_{options.steps + 2}_rank_0.json").read_text())
    seconds, tokens = ({side: found[1:] for side, found in each.items()} for each in (seconds, tokens))
    return seconds, tokens, costs


def framework(costs: list[dict]) -> list[Row]:
    """The framework's share of the whole step, and of each stage what it took and what cost most."""
    stages = [StageCosts(**stage) for stage in costs]
    whole = stages[0]
    kinds = ", ".join(f"{kind} {taken / whole.seconds:.0%}" for kind, taken in whole.kinds.items())
    share = 100 * whole.framework_s / whole.seconds
    found = [Row("framework time of a GRPO step", share, "% of the step", "<= 5", kinds)]
    for stage in stages[1:]:
        if stage.seconds > 0.01 * whole.seconds:
            note = f"framework {stage.framework_s / stage.seconds:.1%}; {top_costs(stage, 5)}"
            found.append(Row(f"stage {stage.name}", 100 * stage.seconds / whole.seconds, "% of the step", note=note))
    return found


def alone(side: str, options: argparse.Namespace) -> int:
    """Peak memory of this process after all steps of one side."""
    if side == "TRL":
        trl_trainer(options).train()
    else:
        with our_run(options) as run:
            for step in range(options.steps + 1):
                our_step(run, step)
    return peak_bytes()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="per step")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="that count; one before them does not")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory_of", choices=("ours", "TRL"), help="only print the peak memory of one side")
    options = parser.parse_args()
    device.prepare()
    device.join_world()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(alone(options.memory_of, options))
        return
    sides = ("ours", "TRL")
    words = [f"--{name}={getattr(options, name)}" for name in ("prompts", "new", "threads")]
    memory = peaks("tests.benchmarks.iteration", [*words, "--steps=2"], sides if options.memory else ())
    seconds, tokens, costs = measured(options)
    ours, peer = (median(seconds[name]) for name in sides)
    note = (
        f"{spread(seconds['ours'])} against {spread(seconds['TRL'])} a step, of {options.prompts * SAMPLES} responses "
        f"with {median(tokens['ours']):.0f} against {median(tokens['TRL']):.0f} tokens"
    )
    unit = "x TRL's GRPOTrainer"
    rows = [Row("GRPO step", ours / peer, unit, "<= 0.6", note)]
    if memory:
        gib = f"{memory['ours'] / 2**30:.2f} against {memory['TRL'] / 2**30:.2f} GiB, each alone in a process"
        rows.append(Row("GRPO step, peak memory", memory["ours"] / memory["TRL"], unit, "<= 1.0", gib))
    finish(rows + framework(costs), options.json)


if __name__ == "__main__":
    main()
