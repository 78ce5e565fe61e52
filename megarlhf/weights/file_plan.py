"""The files of a folder to be written, laid out whole: their sizes, the few bytes known already, and the units."""

import hashlib
from dataclasses import dataclass, field

import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.head_styles import is_value_head
from megarlhf.weights.archive import Archive
from megarlhf.weights.boxes import LocalTensor, Piece, num_elements, shape_of, whole
from megarlhf.weights.megatron_keys import Share, rank_objects, rank_shares, whole_weights
from megarlhf.weights.safetensors_file import header_of, shards
from megarlhf.weights.source import Source
from megarlhf.weights.torch_dist import Block, aligned, object_bytes
from megarlhf.weights.units import Unit, window


@dataclass
class FilePlan:
    """What goes where. `units` are in the order of the source, so that it is read once from beginning to end."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file, by name."""
    known: list[tuple[str, int, bytes]] = field(default_factory=list)
    """(file, offset, bytes) of what does not come from the source."""
    units: list[Unit] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def digest(self) -> str:
        """SHA-256 of the plan: equal plans make equal files from equal sources."""
        lines: list[tuple] = [*sorted(self.sizes.items()), *self.known]
        lines += [(unit.file, unit.offset, str(unit.dtype), unit.content) for unit in self.units]
        return hashlib.sha256("\n".join(map(repr, lines)).encode()).hexdigest()


def hugging_face_plan(source: Source, dtype: torch.dtype | None, max_shard_bytes: int) -> FilePlan:
    """Safetensors files of at most `max_shard_bytes` (or one tensor); weights are cast to `dtype` unless None."""
    plan, shapes = FilePlan(), source.shapes
    dtypes = {name: stored_dtype(source, name, dtype) for name in shapes}
    sizes = {name: num_elements(whole(shape)) * dtypes[name].itemsize for name, shape in shapes.items()}
    for file, names in shards(sizes, max_shard_bytes).items():
        header = header_of([(name, shapes[name], dtypes[name]) for name in names])
        plan.known.append((file, 0, header))
        at = len(header)
        for name in names:
            content = LocalTensor(shapes[name], (Piece(name, whole(shapes[name]), whole(shapes[name])),))
            plan.units.append(Unit(file, at, content, dtypes[name]))
            at += sizes[name]
        plan.sizes[file] = at
    return plan


def megatron_plan(source: Source, layout: Layout, dtype: torch.dtype | None) -> tuple[FilePlan, list[Block]]:
    """One `.distcp` file for each (tp, pp) rank of `layout`, and the table of what lies in them."""
    plan, blocks, placed = FilePlan(), [], []
    complete = enumerate(whole_weights(source.architecture, source.head))
    order = {name: number for number, place in complete for name in (place, *place.other_names())}
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            file, at = f"__{pp * layout.tp + tp}_0.distcp", 0
            for name in rank_objects(source.architecture, layout, pp) if tp == 0 else []:
                at, data = aligned(at), object_bytes()
                plan.known.append((file, at, data))
                blocks.append(Block(name, None, file, at, len(data), None))
                at += len(data)
            for share in rank_shares(source.architecture, layout, source.head, tp, pp):
                for unit, block in _units_of(share, source, dtype, file, at):
                    placed.append((order[share.place], unit))
                    blocks.append(block)
                    at = unit.offset + unit.num_bytes
            plan.sizes[file] = at
    _require_one_dtype(source, blocks)
    plan.units = [unit for _, unit in sorted(placed, key=lambda pair: pair[0])]
    return plan, blocks


def _units_of(share: Share, source: Source, dtype: torch.dtype | None, file: str, at: int) -> list[tuple[Unit, Block]]:
    """A rank's weight in as many archives as it has boxes, from byte `at` of its file on."""
    kept, found = _common_dtype(share, source, dtype), []
    for target, box in share.boxes:
        archive, at = Archive(shape_of(target), kept), aligned(at)
        found.append(
            (
                Unit(file, at, window(share.local, box), kept, archive),
                Block(share.place.key, target, file, at, archive.num_bytes, kept),
            )
        )
        at += archive.num_bytes
    return found


def _require_one_dtype(source: Source, blocks: list[Block]) -> None:
    """All layers' weights of a kind are one tensor of the checkpoint, which has one dtype."""
    found: dict[str, set[str]] = {}
    for block in blocks:
        if block.box is not None:
            found.setdefault(block.name, set()).add(str(block.dtype))
    for name, dtypes in sorted(found.items()):
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{source.tensors.path}: the layers of {name}, one tensor of the checkpoint, have several dtypes "
                f"({', '.join(sorted(dtypes))}); give --dtype"
            )


def _common_dtype(share: Share, source: Source, dtype: torch.dtype | None) -> torch.dtype:
    names = sorted({piece.hf_name for piece in share.local.pieces}) or [next(iter(source.shapes))]
    found = {stored_dtype(source, name, dtype) for name in names}
    if len(found) > 1:
        raise CheckpointError(
            f"{source.tensors.path}: {', '.join(names)} make up one weight but have several dtypes "
            f"({', '.join(sorted(map(str, found)))}); give --dtype"
        )
    return found.pop()


def stored_dtype(source: Source, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is stored as. A value head is float32 or what it was, whatever the model becomes."""
    return source.tensors.dtype(name) if dtype is None or is_value_head(name) else dtype
