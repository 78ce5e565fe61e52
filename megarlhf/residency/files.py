"""Raw bytes of tensors in a file of one rank, read and written in pieces, so that no second copy is ever in memory."""

import ctypes
import os
from pathlib import Path

import torch

from megarlhf.errors import ResidencyError

PIECE_BYTES = 2**26


class BytesFile:
    """A file that tensors' bytes are put into and fetched from; made with the first bytes, removed by `remove`."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Puts `source` (uint8, one dimension) at `offset` bytes. Raises ResidencyError where the disk refuses."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
                file.seek(offset)
                for piece in source.split(PIECE_BYTES):
                    held = piece.cpu()
                    _all_of(file.write, _memory(held))
        except OSError as problem:
            raise ResidencyError(
                f"residency.folder: {self.path} cannot be written ({problem.strerror}); it has to hold "
                f"{offset + source.numel()} bytes. Choose a folder with room, or residency.idle host"
            ) from problem

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fetches as many bytes as `target` (uint8, one dimension) has, from `offset`."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(offset)
            for piece in target.split(PIECE_BYTES):
                landing = piece if piece.device.type == "cpu" else torch.empty(len(piece), dtype=torch.uint8)
                _all_of(file.readinto, _memory(landing))
                if landing is not piece:
                    piece.copy_(landing)

    def remove(self) -> None:
        """The file is gone, if it was there."""
        self.path.unlink(missing_ok=True)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor (uint8), which has to outlive the view.

    `Tensor.numpy` would do, but it forbids for good that the storage is resized.
    """
    return memoryview((ctypes.c_char * len(tensor)).from_address(tensor.data_ptr())).cast("B")


def _all_of(call, view: memoryview) -> None:
    """A read or write of the whole view: the system may do it in parts."""
    while len(view):
        done = call(view)
        if not done:
            raise ResidencyError(f"a file in residency.folder ended {len(view)} bytes early; did another change it?")
        view = view[done:]


def bytes_of(tensor_or_storage: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8: a view of a contiguous tensor, or of a whole storage."""
    if isinstance(tensor_or_storage, torch.Tensor):
        return tensor_or_storage.detach().view(-1).view(torch.uint8)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor_or_storage.device)
    return empty.set_(tensor_or_storage)


def checksum(view: torch.Tensor) -> int:
    """One number that depends on every byte of `view` (uint8, one dimension) and on the order of 64 MiB pieces."""
    total = 0
    for piece in view.split(PIECE_BYTES):
        whole = len(piece) // 4 * 4
        words = int(piece[:whole].view(torch.int32).sum(dtype=torch.int64)) if whole else 0
        total = (total * 1_000_003 + words + int(piece[whole:].sum(dtype=torch.int64))) % 2**61
    return total
