"""A model on disk, whichever way it is stored: a Hugging Face folder, or a megatron-core distributed checkpoint."""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarlhf.models.architecture import Architecture, read_config
from megarlhf.models.names import Head
from megarlhf.models.score_config import score_statistics
from megarlhf.weights.boxes import LocalTensor, Piece, num_elements, whole
from megarlhf.weights.folder import SafetensorsFolder
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.match import left_over, require_match, require_tied_copy, with_head_named
from megarlhf.weights.megatron_folder import MegatronFolder
from megarlhf.weights.torch_dist import METADATA_NAME

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Tensors by Hugging Face name, and what they make up. `config_folder` has config.json, tokenizer and the like."""

    tensors: SafetensorsFolder | MegatronFolder
    architecture: Architecture
    head: Head
    config_folder: Path

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model with its shape, in the order of the network."""
        return hf_shapes(self.architecture, self.head)

    def score_entries(self) -> dict[str, Any]:
        """What config.json knows about the scores of a reward model, which a copy of it keeps."""
        if self.head != "value":
            return {}
        where = str(self.config_folder / "config.json")
        found = score_statistics(read_config(self.config_folder), self.architecture.num_labels, where)
        return found.entries() if found else {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            num_elements(whole(shape)) * self.tensors.dtype(name).itemsize for name, shape in self.shapes.items()
        )

    def stamp(self) -> dict[str, list]:
        """Size and time of change of every file that the model is read from, so that a change of them is seen."""
        files = {self.tensors.path / name for name in self.tensors.files} | {self.config_folder / "config.json"}
        found = {str(file): file.stat() for file in sorted(files)}
        return {name: [state.st_size, state.st_mtime_ns] for name, state in found.items()}


def open_source(path: str | Path, config: str | Path | None = None) -> Source:
    """Open a model and check it against its config.json, by headers only (a tied copy is read).

    `config` stands in for a checkpoint's own folder when that has no config.json. Raises CheckpointError listing
    everything that is missing, left over or of another shape.
    """
    path = Path(path)
    if (path / METADATA_NAME).is_file() or any(path.glob("*.distcp")):
        folder = MegatronFolder(path, config)
        return Source(folder, folder.architecture, folder.head, folder.config_folder)
    tensors, config_folder = SafetensorsFolder(path), Path(config) if config is not None else path
    architecture = Architecture.from_folder(config_folder)
    tensors, stored = with_head_named(tensors, read_config(config_folder))
    if stored is not None:
        labels = architecture.num_labels or stored.num_labels
        architecture = replace(architecture, num_labels=labels, head_bias=stored.has_bias)
    head: Head = "value" if architecture.num_labels else "vocabulary"
    shapes = hf_shapes(architecture, head)
    ignored = left_over(tensors, architecture, shapes, set(), stored)
    if stored is not None and (stored.prefix != "score" or ignored):
        left = f"; left behind: {', '.join(sorted(ignored))}" if ignored else ""
        log.warning("%s: its score head is %s, which becomes score%s", path, stored.prefix, left)
    require_match(tensors, shapes, ignored, head)
    everything = [LocalTensor(shape, (Piece(name, whole(shape), whole(shape)),)) for name, shape in shapes.items()]
    require_tied_copy(tensors, architecture, ignored, everything)
    return Source(tensors, architecture, head, config_folder)
