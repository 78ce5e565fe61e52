"""From a Hugging Face folder into a model: each rank reads only its own boxes, and nothing is left over on either side.

All files are checked against what the model needs, by their headers, before any weight changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import read_config
from megarlhf.models.build import Model
from megarlhf.models.head_styles import WEIGHT, is_value_head
from megarlhf.models.lora import base_parameters
from megarlhf.models.names import Head
from megarlhf.weights.agree import raise_together
from megarlhf.weights.boxes import LocalTensor, num_elements, slices
from megarlhf.weights.folder import SafetensorsFolder
from megarlhf.weights.local_map import hf_shapes, local_map
from megarlhf.weights.match import left_over, require_match, require_tied_copy, with_head_named


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
    """The value head is zero; one that the folder may have had is ignored."""
    head: str
    """What the value head is called in the folder, such as v_head.summary; empty for none."""


def load_weights(model: Model, path: str | Path, *, new_value_head: bool = False) -> LoadReport:
    """Fill `model` from the safetensors of a folder (collective over the model's world only to fail together).

    With `new_value_head` a value model gets a head of zeros, whatever the folder has: that of a language model, or of a
    reward model of other labels. Heads are read under the names of `head_styles.PREFIXES`. Adapters are left as they
    are. Raises CheckpointError, before any weight changes, for missing or unexpected tensors, wrong shapes or dtypes,
    and folders that are incomplete; all problems are listed.
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
    stored = None
    if model.head == "value":
        folder, stored = with_head_named(folder, read_config(folder.path))
    new = _new_head(folder, wanted, model.head, new_value_head)
    ignored = left_over(folder, model.architecture, wanted, new, stored)
    require_match(folder, {name: shape for name, shape in wanted.items() if name not in new}, ignored, model.head)
    held = local_map(model.architecture, model.groups.layout, model.groups.coordinates, model.head)
    parameters = base_parameters(model)
    assert_same_parameters(held, parameters)
    require_tied_copy(folder, model.architecture, ignored, held.values())
    bytes_read = sum(_fill(parameters[key], tensor, folder, new) for key, tensor in held.items())
    model.weights_changed()
    prefix = stored.prefix if stored and not new else ""
    return LoadReport(len(wanted), bytes_read, tuple(sorted(ignored)), bool(new), prefix)


def assert_same_parameters(held: Mapping, parameters: Mapping) -> None:
    """The model has exactly the parameters that its local map names, in those shapes (ours to keep true)."""
    assert held.keys() == parameters.keys(), f"model and name table differ in {sorted(held.keys() ^ parameters.keys())}"
    for key, tensor in held.items():
        found = tuple(parameters[key].shape)
        assert found == tensor.shape, f"{key}: the model has shape {found}, the name table says {tensor.shape}"


def _new_head(folder: SafetensorsFolder, wanted: Iterable[str], head: Head, is_new: bool) -> set[str]:
    """Names of the value head's tensors where they are to start at zero, else nothing."""
    if head != "value":
        return set()
    if is_new:
        return {name for name in wanted if is_value_head(name)}
    if WEIGHT not in folder.names:
        raise CheckpointError(
            f"{folder.path}: no {WEIGHT}, so this is not a reward or value model; give a SequenceClassification folder "
            "(a critic that is to be trained may start from a language model with a new value head)"
        )
    return set()


def _fill(parameter: torch.nn.Parameter, tensor: LocalTensor, folder: SafetensorsFolder, new: set[str]) -> int:
    """Write a parameter's pieces, and zeros where it has none. Returns the bytes read."""
    with torch.no_grad():
        pieces = [piece for piece in tensor.pieces if piece.hf_name not in new]
        if sum(num_elements(piece.target) for piece in pieces) < parameter.numel():
            parameter.zero_()
        for piece in pieces:
            parameter[slices(piece.target)].copy_(folder.read(piece.hf_name, piece.source))
    return sum(num_elements(piece.source) * folder.dtype(piece.hf_name).itemsize for piece in pieces)
