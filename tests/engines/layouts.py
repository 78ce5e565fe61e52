"""For comparing engines across layouts: frozen batches, and local tensors brought back to Hugging Face names."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megarlhf.algorithms.credit import ppo_credit
from megarlhf.algorithms.state import ppo_state
from megarlhf.config.settings import PPO
from megarlhf.records.experience import Experience, scatter_rows
from megarlhf.records.spans import Spans
from megarlhf.weights.local_map import local_map

VOCAB = 101


def frozen_batch(num_rows: int = 7, seed: int = 3, groups: Sequence[int] | None = None) -> Experience:
    """Ragged random rows with every field filled and credit assigned; the same on every rank. Rows of one of `groups`
    have the same prompt; by default each row is a group."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (num_rows, 2), generator=generator).tolist()
    ids = [[torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    groups = range(num_rows) if groups is None else groups
    ids = [(ids[groups.index(group)][0], response) for group, (_, response) in zip(groups, ids, strict=True)]
    logps = [(-3 * torch.rand(len(response), generator=generator)).tolist() for _, response in ids]
    batch = Experience.from_completions(
        [prompt for prompt, _ in ids],
        [response for _, response in ids],
        logps,
        row_id=range(num_rows),
        group=groups,
        finished=[True] * num_rows,
    )

    def noise(scale: float) -> torch.Tensor:
        rows = [scale * torch.randn(len(row), generator=generator) for row in logps]
        return scatter_rows(rows, batch.mask)

    batch = batch.replace(
        logp_start=batch.logp_rollout + noise(0.01),
        logp_reference=batch.logp_rollout + noise(0.1),
        value=noise(1.0),
        score=torch.randn(num_rows, generator=generator),
    )
    return ppo_credit(batch, PPO(), ppo_state(PPO()))[0]


@contextmanager
def every_row_whole() -> Iterator[None]:
    """Inside the block each row of a stream is computed by itself, to its last token."""
    real = Spans.of
    Spans.of = classmethod(lambda cls, experience, reads, *, shares_prompts: cls.unshared(experience.lengths.tolist()))
    try:
        yield
    finally:
        Spans.of = real


def tensors_by_name(model, tensor_of) -> list[tuple[str, tuple, torch.Tensor]]:
    """(Hugging Face name, box in that tensor, values) for every piece this rank holds of `tensor_of(parameter)`."""
    groups = model.groups
    pieces = local_map(model.architecture, groups.layout, groups.coordinates, model.head)
    found = []
    for key, parameter in model.named_parameters().items():
        values = tensor_of(parameter).detach()
        for piece in pieces[key].pieces:
            local = values[tuple(slice(*edge) for edge in piece.target)]
            found.append((piece.hf_name, piece.source, local.clone().float()))
    return found


def assemble(ranks: list[list[tuple[str, tuple, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks; pieces that several ranks hold must be equal."""
    whole: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, box, _ in (piece for rank in ranks for piece in rank):
        ends = [end for _, end in box]
        shapes[name] = [max(pair) for pair in zip(shapes.get(name, ends), ends, strict=True)]
    for name, box, values in (piece for rank in ranks for piece in rank):
        target = whole.setdefault(name, torch.full(shapes[name], float("nan")))[tuple(slice(*edge) for edge in box)]
        seen = ~target.isnan()
        assert torch.equal(target[seen], values[seen]), f"{name}: two ranks hold different values of one element"
        target.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole
