"""A storage's bytes leave and come back; every view of it, whoever holds it, says the same before and after."""

import pytest
import torch

from megarlhf import device
from megarlhf.errors import ResidencyError
from megarlhf.residency.blocks import Blocks, storages

BYTES = 2**20


def flat_buffer() -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]:
    """A flat buffer, a parameter in the middle of it, and a transposed view of that, as megatron-core has them."""
    buffer = torch.randn(BYTES // 4, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(buffer[100:700].view(20, 30))
    return buffer, parameter, parameter.data.t()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_bytes_and_aliases_are_as_before(tmp_path, place):
    buffer, parameter, transposed = flat_buffer()
    before = buffer.clone()
    blocks = Blocks("actor.weights", lambda: [parameter], tmp_path / "file.bin", is_checked=True)
    for _ in range(2):
        assert blocks.num_bytes == BYTES, "the whole storage moves, padding too"
        assert blocks.leave(place) == BYTES
        assert buffer.untyped_storage().nbytes() == 0 and blocks.num_bytes == BYTES
        assert blocks.come_back(place) == BYTES
        assert torch.equal(buffer, before) and torch.equal(transposed, before[100:700].view(20, 30).t())
        blocks.have_changed()
        transposed.mul_(2)
        before[100:700] *= 2
        assert torch.equal(buffer, before) and torch.equal(parameter.data, transposed.t()), "a view was rebound"
    blocks.close()
    assert not (tmp_path / "file.bin").exists()


def test_what_is_gone_comes_back_as_zeros():
    buffer, parameter, _ = flat_buffer()
    blocks = Blocks("actor.gradients", lambda: [parameter], "unused", is_checked=True)
    assert blocks.leave("gone") == blocks.come_back("gone") == 0
    assert buffer.shape == (BYTES // 4,) and not buffer.any()


def test_memory_on_disk_is_given_back(tmp_path):
    """Some MiB each of storages that are mappings of their own, and of smaller ones."""
    tensors = [torch.ones(size // 4) for size in (*[2**24] * 4, *[2**16] * 64)]
    total = sum(tensor.nbytes for tensor in tensors)
    blocks = Blocks("actor.optimizer", lambda: tensors, tmp_path / "file.bin")
    before = device.memory_allocated_bytes()
    blocks.leave("disk")
    freed = before - device.memory_allocated_bytes()
    assert abs(freed - total) < 0.02 * total
    blocks.come_back("disk")
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_file_that_still_tells_the_truth_is_not_written_again(tmp_path):
    _, parameter, _ = flat_buffer()
    blocks = Blocks("reward.weights", lambda: [parameter], tmp_path / "file.bin")
    assert [blocks.leave("disk"), blocks.come_back("disk"), blocks.leave("disk")] == [BYTES, BYTES, 0]
    blocks.come_back("disk")
    blocks.have_changed()
    assert blocks.leave("disk") == BYTES


def test_a_transfer_that_lost_a_byte_is_found_out(tmp_path):
    _, parameter, _ = flat_buffer()
    blocks = Blocks("critic.weights", lambda: [parameter], tmp_path / "file.bin", is_checked=True)
    blocks.leave("disk")
    written = bytearray((tmp_path / "file.bin").read_bytes())
    written[12345] ^= 1
    (tmp_path / "file.bin").write_bytes(written)
    with pytest.raises(ResidencyError, match="critic.weights: block 0 of 1 came back from disk with other bytes"):
        blocks.come_back("disk")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    _, parameter, _ = flat_buffer()
    with pytest.raises(ResidencyError, match="residency.folder: .*cannot be written"):
        Blocks("actor.weights", lambda: [parameter], tmp_path / "file/weights.bin").leave("disk")


def test_a_shared_storage_counts_once():
    buffer, parameter, transposed = flat_buffer()
    assert len(storages([parameter, transposed, buffer, torch.zeros(0), torch.ones(3)])) == 2
