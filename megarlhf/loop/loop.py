"""The training loop: collect, score, credit, learn. The algorithm is a value; there is no branch on its name."""

from megarlhf.loop.run import Run
from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS


def train(run: Run) -> None:
    """Runs every step. Collective over the world: each rank runs the same program on the same batch record."""
    for step in range(run.num_steps):
        with run.spans("total"):
            batch = run.next_batch(step)
            for name, scorer in run.scorers.items():
                with run.spans(name), run.resident(name, WEIGHTS):
                    batch = scorer.annotate(batch)
            batch = run.credit(batch)
            for name, learner in run.learners.items():
                with run.spans(f"learn_{name}"), run.resident(f"learn_{name}", WEIGHTS, GRADIENTS, OPTIMIZER):
                    for minibatch in run.minibatches(batch, step):
                        if run.record(name, learner.update(run.parts(name, minibatch))):
                            break
        run.finish(step, batch)
