"""One GRPO update and one PPO update, ours and TRL's way: tokens per second on the same sequences, and peak memory.

    python -m tests.benchmarks.learning [--rows 8 --threads 2 --rounds 5 --json FILE]     (needs `make assets`)
    python -m tests.benchmarks.learning --algorithms grpo --samples 8 --prompt 256 256    (one long prompt)

Both sides train SmolLM2-135M in float32 on sequences of ragged length (prompts of 8 to 64 tokens with 4 responses each,
of 4 to 64) with one AdamW step per update; tokens are those of the sequences, padding does not count, and a prompt
counts for each of its responses. Before anything is timed, both sides must agree on the gradient norm of the first
update: they compute the same loss.

GRPO's peer is TRL's GRPOTrainer: its training_step, clipping and optimizer step (without gradient checkpointing, which
costs it a fifth of its speed). PPO is not in TRL any more; its peer follows the update of TRL's last PPOTrainer: the
whole logits of policy and value model from one padded batch, one loss, one AdamW over both, entropy for the log.
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from megarlhf import device
from tests.benchmarks.report import Row, finish
from tests.benchmarks.rounds import in_turn, peak_bytes, peaks, spread

MODEL = "assets/SmolLM2-135M-Instruct"
LEARNING_RATE = 1e-6
Update = Callable[[], float]
"""One update; returns the gradient norm before clipping."""


def experience(options: argparse.Namespace):
    """Rows of random tokens in groups, with what earlier stages would have filled in."""
    from megarlhf.records.experience import Experience

    random, num_rows, samples = torch.Generator().manual_seed(0), options.rows, options.samples

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (1,), generator=random))
        return torch.randint(100, 20000, (length,), generator=random).tolist()

    prompts = [ids(*options.prompt) for _ in range(num_rows // samples)]
    rows = Experience.from_completions(
        [prompts[row // samples] for row in range(num_rows)],
        [ids(4, 64) for _ in range(num_rows)],
        None,
        row_id=range(num_rows),
        group=[row // samples for row in range(num_rows)],
        finished=[True] * num_rows,
    )
    per_row = torch.randn(num_rows, generator=random)[:, None].expand(rows.mask.shape)
    value, target = (torch.randn(rows.mask.shape, generator=random) for _ in range(2))
    return rows.replace(advantage=per_row * rows.mask, value=value * rows.mask, target=target * rows.mask)


def ours_grpo(rows) -> Update:
    """The actor's update, as a run of one step per batch makes it."""
    from megarlhf.config.algorithms import GRPO

    actor = _learner("actor")
    start = _log_probs(actor, rows)
    return lambda: _update(actor, start, "grpo", GRPO(kl_coef=0.0, loss_mean="token"))


def ours_ppo(rows) -> Update:
    """The critic's update and the actor's; the norm is over the gradients of both."""
    from megarlhf.config.algorithms import PPO

    critic, actor, settings = _learner("critic"), _learner("actor"), PPO()
    start = _log_probs(actor, rows)

    def update() -> float:
        norms = [_update(learner, start, "ppo", settings) for learner in (critic, actor)]
        return sum(norm**2 for norm in norms) ** 0.5

    return update


def _learner(role: str):
    from megarlhf.config.algorithms import PPO
    from megarlhf.config.settings import Actor, Critic, Optimizer, PPORun
    from megarlhf.loop.roles import roles
    from megarlhf.loop.workshop import Workshop, learner

    adam = Optimizer(learning_rate=LEARNING_RATE, clip_grad=1.0, beta2=0.999)
    actor, critic = Actor(model=MODEL, optimizer=adam), Critic(new_head="always", optimizer=adam)
    settings = PPORun(actor=actor, critic=critic, algorithm=PPO())
    cast = roles(settings)
    return learner(Workshop(1, 0).model(cast[role]), getattr(settings, role), 1000, 0)


def _log_probs(actor, rows):
    from megarlhf.engines.scorer import LogprobScorer

    return LogprobScorer(actor.model, "logp_start", 1.0, actor.max_tokens).annotate(rows)


def _update(learner, rows, algorithm: str, settings) -> float:
    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.engines.learner import Part
    from megarlhf.loop.objectives import objective

    part = Part(rows, objective(ALGORITHMS[algorithm], settings, learner.model.head))
    return learner.update([part]).gradient_norm


def _sides(algorithm: str) -> dict[str, Callable]:
    from tests.benchmarks import trl_updates

    return {
        "grpo": {"ours": ours_grpo, "TRL": trl_updates.grpo},
        "ppo": {"ours": ours_ppo, "TRL": trl_updates.ppo},
    }[algorithm]


def compare(algorithm: str, options: argparse.Namespace) -> list[Row]:
    """Speed and memory of one update."""
    words = ["--algorithms", algorithm, "--prompt", *map(str, options.prompt)]
    words += [f"--{name}={getattr(options, name)}" for name in ("rows", "samples", "threads")]
    memory = peaks("tests.benchmarks.learning", words, ("ours", "TRL"))
    rows = experience(options)
    tokens, padded = int(rows.lengths.sum()), _padded(rows)
    updates = {name: build(rows) for name, build in _sides(algorithm).items()}
    norms = {name: update() for name, update in updates.items()}
    assert abs(norms["ours"] / norms["TRL"] - 1) < 1e-3, f"the sides compute different gradients: norms {norms}"
    seconds = in_turn(updates, options.rounds)
    ours, peer = (median(seconds[name]) for name in ("ours", "TRL"))
    note = (
        f"{tokens / ours:.0f} against {tokens / peer:.0f} tokens/s: {spread(seconds['ours'])} against "
        f"{spread(seconds['TRL'])} for {tokens} tokens ({padded} padded)"
    )
    label = "TRL's GRPOTrainer" if algorithm == "grpo" else "an update like TRL's PPOTrainer"
    speed = Row(f"{algorithm} update", peer / ours, f"x {label}", ">= 1.3", note)
    gib = f"{memory['ours'] / 2**30:.2f} against {memory['TRL'] / 2**30:.2f} GiB, each alone in a process"
    ratio = memory["ours"] / memory["TRL"]
    return [speed, Row(f"{algorithm} update, peak memory", ratio, f"x {label}", "<= 1.0", gib)]


def _padded(rows) -> int:
    """Tokens of one batch whose prompts are padded to the longest on the left, and whose responses on the right."""
    return rows.num_rows * int(rows.prompt_lengths.max() + (rows.lengths - rows.prompt_lengths).max())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"], choices=("grpo", "ppo"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="rows of a prompt")
    parser.add_argument("--prompt", type=int, nargs=2, default=(8, 64), help="its fewest and most tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory_of", choices=("ours", "TRL"), help="only print the peak memory of three updates")
    options = parser.parse_args()
    device.prepare()
    device.join_world()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        update = _sides(options.algorithms[0])[options.memory_of](experience(options))
        for _ in range(3):
            update()
        print(peak_bytes())
        return
    found = []
    for algorithm in options.algorithms:
        found += compare(algorithm, options)
        gc.collect()  # TRL's trainer and its model refer to each other
    finish(found, options.json)


if __name__ == "__main__":
    main()
