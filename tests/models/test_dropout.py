"""Dropout, where it is asked for: random while training only, and the same on tensor ranks that hold one residual."""

import pytest
import torch

from megarlhf.config.layout import Layout
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama


def passes(rank: int, world_size: int, layout: Layout, folder: str):
    """Hidden states of two training passes and one scoring pass, and of one without dropout."""
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.forward import packed_forward
    from megarlhf.parallel.groups import build_groups, seed_dropout
    from megarlhf.records.packing import pack_rows
    from megarlhf.weights.load import load_weights
    from tests.engines.layouts import frozen_batch

    groups, packed = build_groups(layout, world_size), pack_rows(frozen_batch(), range(4), multiple=2)
    found = []
    with torch.no_grad():
        for dropout in (0.3, 0.0):
            architecture = Architecture.from_folder(folder)
            model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, dropout=dropout)
            load_weights(model, folder)
            seed_dropout(groups, 5)
            chunk = model.chunks[0]
            if dropout:
                found += [packed_forward(chunk.train(), packed) for _ in range(2)]
            found.append(packed_forward(chunk.eval(), packed))
    return found


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_dropout_acts_while_training_only(layout, tmp_path):
    folder = str(write_llama(tmp_path / "model"))
    ranks = run_on_ranks(layout.tp, passes, layout, folder)
    first, second, scored, plain = ranks[0]
    assert not torch.equal(first, second) and not torch.allclose(first, plain)
    assert torch.equal(scored, plain)
    for other in ranks[1:]:
        for ours, theirs in zip(ranks[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    again = run_on_ranks(layout.tp, passes, layout, folder)[0]
    assert torch.equal(first, again[0]), "the same seed drew another mask"
