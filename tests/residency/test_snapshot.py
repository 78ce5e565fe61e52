"""A snapshot swaps weights in and out of one module bit for bit, and cannot be entered twice."""

import pytest
import torch

from megarlhf.errors import ResidencyError
from megarlhf.residency.snapshot import Snapshot


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for name in "ab"}


def test_the_module_holds_the_snapshot_inside_and_its_own_weights_afterwards():
    module = parameters()
    start = {name: parameter.detach().clone() for name, parameter in module.items()}
    snapshot = Snapshot(module)
    for parameter in module.values():
        parameter.data.mul_(1.7)
    trained = {name: parameter.detach().clone() for name, parameter in module.items()}
    for _ in range(2):
        with snapshot.swapped_in(module):
            assert all(torch.equal(module[name], start[name]) for name in module)
        assert all(torch.equal(module[name], trained[name]) for name in module)


def test_weights_come_back_when_the_block_raises():
    module = parameters()
    snapshot = Snapshot(module)
    module["a"].data.zero_()
    with pytest.raises(KeyError), snapshot.swapped_in(module):
        raise KeyError
    assert not module["a"].any()


def test_storage_and_views_stay():
    module = parameters()
    snapshot = Snapshot(module)
    module["a"].data.zero_()
    view, address = module["a"].data.view(-1), module["a"].data_ptr()
    with snapshot.swapped_in(module):
        assert module["a"].data_ptr() == address and view.any()
    assert not view.any()


def test_entering_twice_is_refused():
    module = parameters()
    snapshot = Snapshot(module)
    with snapshot.swapped_in(module), pytest.raises(AssertionError, match="already swapped in"):
        with snapshot.swapped_in(module):
            pass


def test_memory_is_accounted():
    assert Snapshot(parameters()).num_bytes == 2 * 3 * 4 * 4


def test_a_snapshot_on_disk_is_exchanged_like_one_in_memory(tmp_path):
    module = parameters()
    start = {name: parameter.detach().clone() for name, parameter in module.items()}
    snapshot = Snapshot(module, file=tmp_path / "reference.bin", is_checked=True)
    for parameter in module.values():
        parameter.data.mul_(1.7)
    trained = {name: parameter.detach().clone() for name, parameter in module.items()}
    for _ in range(2):
        with snapshot.swapped_in(module):
            assert all(torch.equal(module[name], start[name]) for name in module)
        assert all(torch.equal(module[name], trained[name]) for name in module)
    assert (tmp_path / "reference.bin").stat().st_size == snapshot.num_bytes == 2 * 3 * 4 * 4
    assert snapshot.bytes_exchanged == 2 * 2 * 2 * snapshot.num_bytes
    (tmp_path / "reference.bin").write_bytes(bytes(snapshot.num_bytes))
    with pytest.raises(ResidencyError, match="other bytes were exchanged in"), snapshot.swapped_in(module):
        pass
    snapshot.close()
    assert not list(tmp_path.iterdir())
