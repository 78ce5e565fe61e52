"""A folder's tensors against what a model needs: nothing missing, nothing left over, every shape as its config says."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.families import FAMILIES
from megarlhf.models.head_styles import HEAD_NAMES, StoredHead, stored_head
from megarlhf.models.names import Head
from megarlhf.weights.boxes import LocalTensor
from megarlhf.weights.folder import SafetensorsFolder


def with_head_named(
    folder: SafetensorsFolder, config: Mapping[str, Any]
) -> tuple[SafetensorsFolder, StoredHead | None]:
    """The folder with its score head under the names that it goes by here, and what head that is.

    `config` is its config.json, which may name the head. Raises CheckpointError when it holds several.
    """
    shapes = {name: folder.shape(name) for name in folder.names if "layers." not in name}
    head = stored_head(shapes, config, str(folder.path))
    return (folder.renamed(head.aliases) if head else folder), head


def left_over(
    folder: SafetensorsFolder, architecture: Architecture, wanted: dict, new: set[str], head: StoredHead | None
) -> set[str]:
    """Allowed left-overs: derived buffers, a second copy of tied embeddings, heads that another one replaces.

    `head` is the one in the folder, `new` the names of a head that does not come from it.
    """
    family = FAMILIES[architecture.family]
    others = set(folder.names) - set(wanted)
    derived = {name for name in others if name.endswith(family.ignored_suffixes)}
    is_beside = head is not None and head.is_beside_a_language_model
    output = {family.output.hf[0]} & others if architecture.tied or new or is_beside else set()
    return derived | output | (set(HEAD_NAMES) & set(folder.names) if new else set())


def require_match(folder: SafetensorsFolder, wanted: dict[str, tuple[int, ...]], ignored: set[str], head: Head) -> None:
    """Raise CheckpointError listing every tensor that is missing, left over, of another shape or of no usable dtype."""
    found = set(folder.names)
    problems = [f"{folder.path}: {name} {list(wanted[name])} is missing" for name in wanted if name not in found]
    for name in sorted(found - set(wanted) - ignored):
        problems.append(
            f"{folder.path / folder.file_of(name)}: holds {name} {list(folder.shape(name))}, which is no part of this "
            f"model with a {head} head"
        )
    for name, shape in wanted.items():
        if name in found and folder.shape(name) != shape:
            problems.append(
                f"{folder.path / folder.file_of(name)}: {name} has shape {list(folder.shape(name))}, config.json says "
                f"{list(shape)}"
            )
        elif name in found:
            folder.dtype(name)
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        move = "the folder's weights and config.json are of different models; use a matching pair"
        raise CheckpointError("\n".join([*problems[:20], *more, move]))


def require_tied_copy(
    folder: SafetensorsFolder, architecture: Architecture, ignored: set[str], held: Iterable[LocalTensor]
) -> None:
    """A second copy of tied embeddings must be a copy: this rank compares the rows that it holds."""
    family = FAMILIES[architecture.family]
    embedding, output = family.embedding.hf[0], family.output.hf[0]
    if not (architecture.tied and output in ignored):
        return
    boxes = [piece.source for tensor in held for piece in tensor.pieces if piece.hf_name == embedding]
    for box in boxes:
        if not _same_bits(folder.read(embedding, box), folder.read(output, box)):
            raise CheckpointError(
                f"{folder.path}: config.json ties the embeddings, but {output} differs from {embedding}; set "
                "tie_word_embeddings to false in config.json, or remove the tensor"
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bytes: what is not a number equals itself here."""
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)
