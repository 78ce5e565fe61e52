"""One PPO update of every family beyond Llama is the same update under tensor and pipeline parallelism."""

import pytest

from megarlhf.config.layout import Layout
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble
from tests.engines.test_learner import update
from tests.families import ON_RANKS, VARIANTS
from tests.tiny import write_llama

LAYOUTS = (Layout(tp=4), Layout(tp=2, pp=2, sp=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("learner")
    return {name: write_llama(top / name, **VARIANTS[name]) for name in ON_RANKS}


def updates(rank, world_size, folders, layouts):
    return {
        (name, layout): update(rank, world_size, layout, 4096, str(folder), "vocabulary")
        for name, folder in folders.items()
        for layout in layouts
    }


def test_one_update_does_not_depend_on_the_layout(folders):
    (alone,) = run_on_ranks(1, updates, folders, [Layout()])
    ranks = run_on_ranks(4, updates, folders, LAYOUTS)
    for name in folders:
        loss, norm, gradients, weights = alone[name, Layout()]
        for layout in LAYOUTS:
            found = [rank[name, layout] for rank in ranks]
            assert found[0][:2] == pytest.approx((loss, norm), rel=1e-5), (name, layout)
            for place, expected in ((2, assemble([gradients])), (3, assemble([weights]))):
                whole = assemble([one[place] for one in found])
                assert whole.keys() == expected.keys()
                difference = sum(float((whole[key] - expected[key]).square().sum()) for key in expected) ** 0.5
                assert difference <= 1e-5 * max(norm, 1), (name, layout, place)
