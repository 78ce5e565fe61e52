"""Whole tensors on one rank, which writes them: the others send their boxes, and its failure is everybody's."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarlhf.config.settings import Precision
from megarlhf.errors import CheckpointError
from megarlhf.weights.agree import raise_together
from megarlhf.weights.boxes import LocalTensor, Piece, whole
from megarlhf.weights.exchange import DTYPES, exchange
from megarlhf.weights.local_map import Key
from megarlhf.weights.plan import plan_transfers
from megarlhf.weights.transfers import Holding

WRITER = 0
"""The rank that writes. It holds one file's tensors in host memory at a time."""


def on_writer(action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do something on the writer; a failure is raised on all ranks (collective over `group`)."""
    problem = None
    try:
        if dist.get_rank(group) == WRITER:
            action()
    except (OSError, ValueError) as error:
        is_ours = isinstance(error, CheckpointError)
        problem = str(error) if is_ours else f"export failed: {type(error).__name__}: {error}"
    raise_together(problem, group)


def gather(
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[Holding],
    tensors: Mapping[Key, torch.Tensor],
    dtype_of: Callable[[str], Precision],
    group: dist.ProcessGroup,
    device: torch.device,
    bucket_bytes: int,
) -> dict[str, torch.Tensor]:
    """The tensors named in `shapes`, whole, in host memory of the writer; nothing elsewhere. Collective over `group`.

    `held` says what each rank of the group holds, `tensors` are this rank's. The group communicates on `device`.
    """
    made = {id(holding): _only(holding, set(shapes)) for holding in held}
    wanted = {
        (0, name): LocalTensor(shape, (Piece(name, whole(shape), whole(shape)),)) for name, shape in shapes.items()
    }
    nothing: Holding = {}
    targets = [wanted if rank == WRITER else nothing for rank in range(group.size())]
    plan = plan_transfers([made[id(holding)] for holding in held], targets, dtype_of, bucket_bytes)
    mine = wanted if dist.get_rank(group) == WRITER else nothing
    result = {key: torch.empty(tensor.shape, dtype=DTYPES[dtype_of(key[1])]) for key, tensor in mine.items()}
    exchange(plan, tensors, result, group, device)
    return {name: tensor for (_, name), tensor in result.items()}


def _only(holding: Holding, names: set[str]) -> Holding:
    """The local tensors that hold any of the named tensors, without their other pieces."""
    kept = {key: [piece for piece in tensor.pieces if piece.hf_name in names] for key, tensor in holding.items()}
    return {key: LocalTensor(holding[key].shape, tuple(pieces)) for key, pieces in kept.items() if pieces}


def save_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one safetensors file, down to the disk."""
    save_file(tensors, file, metadata={"format": "pt"})
    with file.open("rb") as written:
        os.fsync(written.fileno())
