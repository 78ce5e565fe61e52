"""A few numbers per Hugging Face tensor from which two models' distance can be told, whatever layouts they live in.

Number j is the sum over elements of sign_j(index) * value, with seeded random signs (Johnson and Lindenstrauss, 1984;
Achlioptas, 2003): the expected square of the difference of two such sums is the squared distance of the tensors.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megarlhf.models.build import Model
from megarlhf.models.lora import merged_parameters
from megarlhf.weights.boxes import Piece
from megarlhf.weights.checksum import indexed_chunks
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.plan import holdings, owned_pieces

NUM_SIGNS = 16
"""Numbers per tensor: a distance is told to about one part in six."""

Sketch = Mapping[str, Sequence[float]]
"""By Hugging Face name, `NUM_SIGNS` numbers."""


def weight_sketch(model: Model, group: dist.ProcessGroup) -> dict[str, list[float]]:
    """Of all tensors of the model, LoRA's adapters merged in. Collective over `group`, the world."""
    shapes = hf_shapes(model.architecture, model.head)
    held = holdings(model.architecture, model.groups.layout, group.size(), model.head)
    tensors = merged_parameters(model)
    device = next(iter(model.named_parameters().values())).device
    sums = {name: torch.zeros(NUM_SIGNS, dtype=torch.float64, device=device) for name in shapes}
    for key, piece in owned_pieces(held)[dist.get_rank(group)]:
        sums[piece.hf_name] += _piece_sums(tensors[key], piece, shapes[piece.hf_name]).to(device)
    total = torch.stack(list(sums.values()))
    dist.all_reduce(total, group=group)
    return dict(zip(shapes, total.tolist(), strict=True))


def distances(one: Sketch, other: Sketch, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Root mean square difference of each tensor's elements, estimated."""
    return {
        name: math.sqrt(
            sum((a - b) ** 2 for a, b in zip(one[name], other[name], strict=True)) / NUM_SIGNS / math.prod(shape)
        )
        for name, shape in shapes.items()
    }


@torch.no_grad()
def _piece_sums(tensor: torch.Tensor, piece: Piece, shape: tuple[int, ...]) -> torch.Tensor:
    """[NUM_SIGNS]. Values with the same signs are added up first: each is then touched once."""
    alike = torch.zeros(2**NUM_SIGNS, dtype=torch.float64, device=tensor.device)
    for values, index in indexed_chunks(tensor, piece, shape):
        bits = _mixed(index) & (2**NUM_SIGNS - 1)
        alike += torch.bincount(bits.flatten(), values.double().flatten(), 2**NUM_SIGNS)
    number = torch.arange(NUM_SIGNS, device=tensor.device)
    signs = 1 - 2 * ((torch.arange(2**NUM_SIGNS, device=tensor.device) >> number[:, None]) & 1)
    return signs.double() @ alike


def _mixed(index: torch.Tensor) -> torch.Tensor:
    """Indexes as well-mixed bits: two rounds of multiplying and folding, modulo 2^64."""
    bits = index * -7046029254386353131  # the golden ratio's odd constant, 0x9E3779B97F4A7C15
    bits = (bits ^ ((bits >> 32) & 0xFFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    return (bits ^ ((bits >> 29) & 0x7FFFFFFFF)) >> 20
