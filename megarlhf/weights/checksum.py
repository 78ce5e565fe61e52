"""One number per Hugging Face tensor that depends on every bit and its place, but not on the layout it lives in.

sum over elements of bits * (2 * index + 1), modulo 2^64, with the element's index in the whole tensor.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from megarlhf.errors import CheckpointError
from megarlhf.models.build import Model
from megarlhf.models.lora import merged_parameters
from megarlhf.weights.boxes import Box, Piece, slices, split
from megarlhf.weights.local_map import Key, hf_shapes
from megarlhf.weights.plan import holdings, owned_pieces

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_CHUNK_ELEMENTS = 2**20


def weight_checksums(
    model: Model, dtype: torch.dtype, group: dist.ProcessGroup, tensors: Mapping[Key, torch.Tensor] | None = None
) -> dict[str, int]:
    """The checksum of every tensor of the model, its values cast to `dtype` (collective over `group`, the world).

    `tensors` stand in for the model's weights; by default those, with LoRA's adapters merged in.
    """
    shapes = hf_shapes(model.architecture, model.head)
    held = holdings(model.architecture, model.groups.layout, group.size(), model.head)
    tensors = merged_parameters(model) if tensors is None else tensors
    device = next(iter(model.named_parameters().values())).device
    sums = {name: torch.zeros((), dtype=torch.int64, device=device) for name in shapes}
    for key, piece in owned_pieces(held)[dist.get_rank(group)]:
        sums[piece.hf_name] += _piece_sum(tensors[key], piece, shapes[piece.hf_name], dtype).to(device)
    total = torch.stack(list(sums.values()))
    dist.all_reduce(total, group=group)
    return dict(zip(shapes, total.tolist(), strict=True))


def require_equal_weights(
    one: Model, other: Model, group: dist.ProcessGroup, tensors: Mapping[Key, torch.Tensor] | None = None
) -> None:
    """Raise CheckpointError, naming tensors, unless both hold the same weights (collective over `group`, the world).

    Models of different dtypes are compared in the narrower one. `tensors` stand in for the weights of `one`.
    """
    dtypes = (one.dtype, other.dtype)
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
    ours, theirs = weight_checksums(one, dtype, group, tensors), weight_checksums(other, dtype, group)
    differing = [name for name, value in ours.items() if theirs[name] != value]
    if differing:
        raise CheckpointError(
            f"{len(differing)} of {len(ours)} tensors differ between {one.groups.layout} and {other.groups.layout} "
            f"({', '.join(differing[:4])}, ...); the transfer failed, not your settings: please report it"
        )


@torch.no_grad()
def _piece_sum(tensor: torch.Tensor, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for values, index in indexed_chunks(tensor, piece, shape):
        bits = values.to(dtype).contiguous().view(_BITS[dtype]).to(torch.int64)
        total = total + (bits * (2 * index + 1)).sum()
    return total


def indexed_chunks(
    tensor: torch.Tensor, piece: Piece, shape: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A piece's values, a bounded part at a time, each with its index in the flattened whole tensor of `shape`."""
    for box in split(piece.target, _CHUNK_ELEMENTS):
        shift = [there - here for (there, _), (here, _) in zip(piece.source, piece.target, strict=True)]
        whole_box = tuple((start + by, stop + by) for (start, stop), by in zip(box, shift, strict=True))
        yield tensor[slices(box)], _indexes(whole_box, shape, tensor.device)


def _indexes(box: Box, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Index of each element of a box in the flattened whole tensor; broadcasts to the box's shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), size in zip(box, shape, strict=True):
        index = (index * size).unsqueeze(-1) + torch.arange(start, stop, device=device)
    return index
