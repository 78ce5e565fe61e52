"""Weights moved on four ranks are the bytes of a model loaded directly in the target layout."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.checksum import require_equal_weights, weight_checksums
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.load import load_weights
from tests import tiny
from tests.distributed.pool import run_on_ranks

PAIRS = [
    (Layout(tp=2, pp=2), Layout()),
    (Layout(pp=4), Layout(tp=2)),
    (Layout(), Layout(tp=4)),
    (Layout(tp=4), Layout(pp=2)),
    (Layout(pp=2), Layout(tp=2, pp=2)),
    (Layout(tp=2), Layout(tp=4)),
]
ALL_LOCAL = [(Layout(), Layout(tp=4)), (Layout(pp=2), Layout(tp=2, pp=2))]
KINDS = {
    "untied": ({}, "vocabulary"),
    "tied": ({"tied": True, "num_hidden_layers": 5}, "vocabulary"),
    "value": ({"num_labels": 1}, "value"),
}

MESSAGES, LETTERS, SHARED = {"shares_memory": False}, {"shares_memory": False, "letter_bytes": 64}, {}
WAYS = {"untied": (MESSAGES, LETTERS, SHARED), "tied": (SHARED,), "value": (LETTERS,)}


def loaded(folder, layout, world_size, head, dtype):
    architecture = Architecture.from_folder(folder)
    model = build_model(architecture, build_groups(layout, world_size), head=head, dtype=dtype, seed=None)
    load_weights(model, folder)
    return model


def moved_on_rank(rank, world_size, folder, source, target, head, dtypes):
    """(report, names of tensors that differ from a model loaded in the target layout), by messages and by memory."""
    one = loaded(folder, source, world_size, head, dtypes[0])
    other = build_model(one.architecture, build_groups(target, world_size), head=head, dtype=dtypes[1], seed=None)
    expected = loaded(folder, target, world_size, head, dtypes[1]).named_parameters()
    found, differing = other.named_parameters(), []
    assert found.keys() == expected.keys()
    for way in WAYS[folder.name]:
        for parameter in found.values():
            parameter.data.zero_()
        resharder = Resharder(one, other, bucket_bytes=2048, **way)
        report = resharder.run(is_checked=True)
        assert max(report.peak_extra_bytes, resharder.plan.peak_extra_bytes) <= 2048, "more than one bucket"
        differing += [(key, way) for key in found if not torch.equal(found[key], expected[key])]
    return report, differing


def all_pairs_on_rank(rank, world_size, folders):
    found = {}
    for kind, folder in folders.items():
        for source, target in PAIRS:
            dtypes = (torch.float32, torch.float32)
            found[kind, source, target] = moved_on_rank(
                rank, world_size, folder, source, target, KINDS[kind][1], dtypes
            )
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("exchange")
    return {kind: tiny.write_llama(top / kind, seed=5, **KINDS[kind][0]) for kind in KINDS}


@pytest.fixture(scope="module")
def moved(folders):
    return run_on_ranks(4, all_pairs_on_rank, folders)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}_to_{pair[1]}")
def test_moved_weights_are_those_of_a_model_loaded_there(moved, kind, pair):
    for rank, answers in enumerate(moved):
        report, differing = answers[kind, *pair]
        assert differing == [], f"rank {rank}"
        # Where every rank's share only gets smaller, all of it is there already.
        assert (report.bytes_moved == 0) == (pair in ALL_LOCAL)
        assert report.peak_extra_bytes <= 2048


@pytest.mark.parametrize("kind", ["tied", "value"])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids="_to_".join)
def test_dtypes_may_differ_and_the_narrower_one_travels(tmp_path, kind, dtypes):
    folder = tiny.write_llama(tmp_path / kind, dtype=torch.bfloat16, **KINDS[kind][0])
    types = tuple(getattr(torch, name) for name in dtypes)
    answers = run_on_ranks(4, moved_on_rank, folder, Layout(tp=2, pp=2), Layout(tp=2), KINDS[kind][1], types)
    assert all(differing == [] for _, differing in answers)


def rerun_on_rank(rank, world_size, folder):
    one = loaded(folder, Layout(pp=2), world_size, "vocabulary", torch.float32)
    groups = build_groups(Layout(), world_size)
    other = build_model(one.architecture, groups, head="vocabulary", dtype=torch.float32, seed=None)
    resharder, sums = Resharder(one, other), []
    for _ in range(2):
        resharder.run()
        sums.append(weight_checksums(other, torch.float32, groups.world))
        with torch.no_grad():
            for parameter in one.named_parameters().values():
                parameter += 1
    with torch.no_grad():
        other.named_parameters()[0, "decoder.layers.2.mlp.linear_fc1.weight"][3, 5] += 1
    try:
        require_equal_weights(one, other, groups.world)
    except CheckpointError as error:
        return sums, str(error)


def test_a_second_run_carries_the_new_weights_and_checksums_see_a_difference(folders):
    answers = run_on_ranks(2, rerun_on_rank, folders["untied"])
    for sums, message in answers:
        assert all(sums[0][name] != sums[1][name] for name in sums[0])
        assert "tensors differ between tp1pp2 and tp1pp1" in message


def checksums_on_rank(rank, world_size, folder):
    found = []
    for layout in (Layout(), Layout(tp=2), Layout(pp=2)):
        model = loaded(folder, layout, world_size, "vocabulary", torch.float32)
        found.append(weight_checksums(model, torch.float32, model.groups.world))
    return found


def test_checksums_do_not_depend_on_the_layout_and_equal_a_slow_sum(folders):
    from safetensors.torch import load_file

    weights = load_file(folders["tied"] / "model.safetensors")
    for one, other, third in run_on_ranks(2, checksums_on_rank, folders["tied"]):
        assert one == other == third and one.keys() == weights.keys()
        bits = weights["model.norm.weight"].view(torch.int32).tolist()
        slow = sum(value * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
        assert one["model.norm.weight"] % 2**64 == slow


def rival_on_rank(rank, world_size, folder, source, target):
    """Names that differ between our move and megatron-core's own."""
    from megatron.core.resharding.refit import swap_model_weights

    one = loaded(folder, source, world_size, "vocabulary", torch.float32)
    groups, moved = build_groups(target, world_size), []
    for _ in range(2):
        moved.append(build_model(one.architecture, groups, head="vocabulary", dtype=torch.float32, seed=1))
    Resharder(one, moved[0]).run()
    swap_model_weights([one.chunks[0]], [moved[1].chunks[0]], "gloo")
    ours, theirs = (model.named_parameters() for model in moved)
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.mark.parametrize("pair", [(Layout(tp=2, pp=2), Layout(tp=2)), (Layout(tp=2), Layout(tp=4))], ids=str)
def test_megatron_cores_own_resharding_gives_the_same(tmp_path, pair):
    # megatron-core cannot move between layouts that pad the vocabulary differently: a vocabulary without padding.
    folder = tiny.write_llama(tmp_path, vocab_size=104)
    assert run_on_ranks(4, rival_on_rank, folder, *pair) == [[]] * 4
