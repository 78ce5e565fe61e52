"""From a Hugging Face folder into a model: each rank reads only its own boxes, and nothing is left over on either side.

All files are checked against what the model needs, by their headers, before any weight changes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model
from megarlhf.models.families import FAMILIES
from megarlhf.models.lora import base_parameters
from megarlhf.models.names import Head
from megarlhf.weights.agree import raise_together
from megarlhf.weights.boxes import LocalTensor, num_elements, slices
from megarlhf.weights.folder import SafetensorsFolder
from megarlhf.weights.local_map import hf_shapes, local_map


@dataclass(frozen=True)
class LoadReport:
    """What was read by this rank."""

    num_tensors: int
    """Hugging Face tensors that the model is made of, over all ranks."""
    bytes_read: int
    """By this rank."""
    ignored: tuple[str, ...]
    """Tensors of the folder that the model does not need: rotary buffers, a tied copy, a replaced head."""
    is_value_head_new: bool
    """The folder had no value head; it is zero."""


def load_weights(model: Model, path: str | Path, *, new_value_head: bool = False) -> LoadReport:
    """Fill `model` from the safetensors of a folder (collective over the model's world only to fail together).

    With `new_value_head` a value model may start from a folder without a value head (a language model's): the head is
    then zero. Adapters are left as they are. Raises CheckpointError, before any weight changes, for missing or
    unexpected tensors, wrong shapes or dtypes, and folders that are incomplete; all problems are listed.
    """
    problem, report = None, None
    try:
        report = _load(model, SafetensorsFolder(path), new_value_head)
    except CheckpointError as error:
        problem = str(error)
    raise_together(problem, model.groups.world)
    assert report is not None, "a rank without a problem has read its share"
    return report


def _load(model: Model, folder: SafetensorsFolder, new_value_head: bool) -> LoadReport:
    wanted = hf_shapes(model.architecture, model.head)
    new = _new_head(folder, model.architecture, model.head, new_value_head)
    ignored = _ignored(folder, model.architecture, wanted, new)
    _require_match(folder, {name: shape for name, shape in wanted.items() if name not in new}, ignored, model.head)
    held = local_map(model.architecture, model.groups.layout, model.groups.coordinates, model.head)
    parameters = base_parameters(model)
    assert_same_parameters(held, parameters)
    _require_tied_copy(folder, model.architecture, ignored, held.values())
    bytes_read = sum(_fill(parameters[key], tensor, folder, new) for key, tensor in held.items())
    return LoadReport(len(wanted), bytes_read, tuple(sorted(ignored)), bool(new))


def assert_same_parameters(held: dict, parameters: dict) -> None:
    """The model has exactly the parameters that its local map names, in those shapes (ours to keep true)."""
    assert held.keys() == parameters.keys(), f"model and name table differ in {sorted(held.keys() ^ parameters.keys())}"
    for key, tensor in held.items():
        found = tuple(parameters[key].shape)
        assert found == tensor.shape, f"{key}: the model has shape {found}, the name table says {tensor.shape}"


def _new_head(folder: SafetensorsFolder, architecture: Architecture, head: Head, allowed: bool) -> set[str]:
    """Name of the value head where it is to start at zero, else nothing."""
    name = FAMILIES[architecture.family].value_head.hf[0]
    if head != "value" or name in folder.names:
        return set()
    if not allowed:
        raise CheckpointError(
            f"{folder.path}: no {name}, so this is not a reward or value model; give a SequenceClassification folder "
            "(a critic that is to be trained may start from a language model with a new value head)"
        )
    return {name}


def _ignored(folder: SafetensorsFolder, architecture: Architecture, wanted: dict, new: set[str]) -> set[str]:
    """Allowed left-overs: derived buffers, a second copy of tied embeddings, the head that a new one replaces."""
    family = FAMILIES[architecture.family]
    left_over = set(folder.names) - set(wanted)
    derived = {name for name in left_over if name.endswith(family.ignored_suffixes)}
    output = {family.output.hf[0]} & left_over if architecture.tied or new else set()
    return derived | output


def _require_match(
    folder: SafetensorsFolder, wanted: dict[str, tuple[int, ...]], ignored: set[str], head: Head
) -> None:
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


def _require_tied_copy(
    folder: SafetensorsFolder, architecture: Architecture, ignored: set[str], held: Iterator[LocalTensor]
) -> None:
    """A second copy of tied embeddings must be a copy: this rank compares the rows that it holds."""
    family = FAMILIES[architecture.family]
    embedding, output = family.embedding.hf[0], family.output.hf[0]
    if not (architecture.tied and output in ignored):
        return
    boxes = [piece.source for tensor in held for piece in tensor.pieces if piece.hf_name == embedding]
    for box in boxes:
        if not torch.equal(folder.read(embedding, box), folder.read(output, box)):
            raise CheckpointError(
                f"{folder.path}: config.json ties the embeddings, but {output} differs from {embedding}; set "
                "tie_word_embeddings to false in config.json, or remove the tensor"
            )


def _fill(parameter: torch.nn.Parameter, tensor: LocalTensor, folder: SafetensorsFolder, new: set[str]) -> int:
    """Write a parameter's pieces, and zeros where it has none. Returns the bytes read."""
    with torch.no_grad():
        pieces = [piece for piece in tensor.pieces if piece.hf_name not in new]
        if sum(num_elements(piece.target) for piece in pieces) < parameter.numel():
            parameter.zero_()
        for piece in pieces:
            parameter[slices(piece.target)].copy_(folder.read(piece.hf_name, piece.source))
    return sum(num_elements(piece.source) * folder.dtype(piece.hf_name).itemsize for piece in pieces)
