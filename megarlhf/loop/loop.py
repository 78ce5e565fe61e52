"""The training loop: collect, score, credit, learn. The algorithm is a value; there is no branch on its name."""

from collections.abc import Callable, Mapping

from megarlhf.loop.run import Run
from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS

AfterStep = Callable[[int, Mapping[str, float]], None]
"""Takes the number of steps done, and the numbers of the last one."""


def train(run: Run, first_step: int, after_step: AfterStep) -> None:
    """Runs the steps from `first_step` on. Collective over the world: each rank runs the same program on the same batch
    record."""
    if first_step < run.num_steps:
        run.reporter.begin(first_step + 1, run.num_steps)
    for step in range(first_step, run.num_steps):
        with run.profiled(step):
            with run.spans("total"):
                batch = run.next_batch(step)
                for name, scorer in run.scorers.items():
                    with run.spans(name), run.resident(name, WEIGHTS):
                        batch = scorer.annotate(batch)
                batch = run.credit(batch)
                for name, learner in run.learning(step).items():
                    with run.spans(f"learn_{name}"), run.resident(f"learn_{name}", WEIGHTS, GRADIENTS, OPTIMIZER):
                        for minibatch in run.minibatches(batch, step):
                            if run.record(name, learner.update(run.parts(name, minibatch))):
                                break
            numbers = run.finish(step, batch)
        after_step(step + 1, numbers)
