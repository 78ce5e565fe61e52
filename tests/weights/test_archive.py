"""torch reads archives that are written around data which torch never saw."""

import io
import zipfile
import zlib

import pytest
import torch

from megarlhf.weights.archive import Archive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (1, 5, 3), (64, 64)])
def test_torch_loads_the_tensor_and_zip_finds_every_checksum_right(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    archive = Archive(shape, dtype)
    head, tail = archive.around(zlib.crc32(data))
    written = head + data + tail
    assert len(written) == archive.num_bytes and len(head) == archive.data_offset and len(head) % 64 == 0
    loaded = torch.load(io.BytesIO(written), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)
    assert zipfile.ZipFile(io.BytesIO(written)).testzip() is None


def test_a_tensor_beyond_4_gib_is_addressed_by_64_bits(tmp_path):
    archive = Archive((2**31 + 5, 2), torch.bfloat16)
    head, tail = archive.around(0)
    with (tmp_path / "holes").open("wb") as stream:
        stream.write(head)
        stream.seek(len(head) + archive.num_data_bytes)
        stream.write(tail)
    loaded = torch.load(tmp_path / "holes", weights_only=True, mmap=True)
    assert loaded.shape == (2**31 + 5, 2) and loaded[-1].tolist() == [0, 0]
