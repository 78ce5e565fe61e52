"""A megatron-core distributed checkpoint seen as a Hugging Face folder: the same questions, the same names.

What is not asked for is not read; a tensor that lies in one block is a view of the file.
"""

from pathlib import Path

import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Head
from megarlhf.weights.boxes import Box, Piece, intersect, move, shape_of, slices, whole
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.megatron_keys import OBJECT_SUFFIXES, Place, key_shapes, whole_weights
from megarlhf.weights.torch_dist import TorchDistFolder

_ONE = Layout()
_TRAINING = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler")
"""Beginnings of names that belong to training, not to the model."""


class MegatronFolder:
    """Tensors by Hugging Face name, as `SafetensorsFolder` gives them. `config` is a folder with a config.json.

    Raises CheckpointError when the checkpoint and config.json do not fit: every missing, left-over or misshapen tensor
    is listed.
    """

    def __init__(self, path: str | Path, config: str | Path | None = None):
        self.path = Path(path)
        self.stored = TorchDistFolder(path)
        if config is None and not (self.path / "config.json").is_file():
            raise CheckpointError(
                f"{self.path}: has no config.json beside the weights; give --config FOLDER, the Hugging Face folder "
                "that the model was made from"
            )
        self.config_folder = Path(config) if config is not None else self.path
        self.architecture = Architecture.from_folder(self.config_folder)
        self.head: Head = "value" if self.architecture.num_labels else "vocabulary"
        self._shapes = hf_shapes(self.architecture, self.head)
        self._pieces = self._find()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self.stored.dtype(self._pieces[name][0][0].key)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files that tensors are read from, sorted."""
        return self.stored.files

    def file_of(self, name: str) -> str:
        """Name of a file that holds (part of) a tensor."""
        place, _ = self._pieces[name][0]
        return self.stored.blocks(place.key)[0].file

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, on the host: a view of the file where it lies in one block, else a copy."""
        parts = [part for place, piece in self._pieces[name] for part in self._parts(place, piece, box)]
        if len(parts) == 1 and parts[0][0] == box:
            return parts[0][1]
        result = torch.empty(shape_of(box), dtype=self.dtype(name))
        for where, values in parts:
            result[slices(move(where, box, whole(shape_of(box))))] = values
        return result

    def prefetch(self, name: str, box: Box) -> None:
        """Ask for a box to be read from the disk; does not wait for it."""
        wanted: dict[Place, Box] = {}
        for place, piece in self._pieces[name]:
            common = intersect(piece.source, box)
            if common is not None:
                target = move(common, piece.source, piece.target)
                earlier = wanted.get(place, target)
                hull = zip(target, earlier, strict=True)
                wanted[place] = tuple((min(one[0], two[0]), max(one[1], two[1])) for one, two in hull)
        for place, target in wanted.items():
            self.stored.prefetch(place.key, place.box(target))

    def __reduce__(self):
        return MegatronFolder, (self.path, self.config_folder)  # another process opens it anew

    def _parts(self, place: Place, piece: Piece, box: Box) -> list[tuple[Box, torch.Tensor]]:
        """The blocks of a piece that meet a box of the Hugging Face tensor: (where in that tensor, values)."""
        common = intersect(piece.source, box)
        if common is None:
            return []
        wanted = place.box(move(common, piece.source, piece.target))
        found = []
        for where, values in self.stored.parts(place.key, wanted):
            num_axes = len(place.axes)
            where, values = where[num_axes:], values[(0,) * num_axes]
            found.append((move(where, piece.target, piece.source), values))
        return found

    def _find(self) -> dict[str, list[tuple[Place, Piece]]]:
        """Hugging Face name -> where its pieces lie; and the check that both sides agree."""
        shapes = key_shapes(self.architecture, _ONE, self.head)
        family = FAMILIES[self.architecture.family]
        vocabulary = {family.embedding.local, family.output.local}
        pieces: dict[str, list[tuple[Place, Piece]]] = {name: [] for name in self._shapes}
        used: set[str] = set()
        problems: dict[str, str] = {}
        for place, tensor in whole_weights(self.architecture, self.head).items():
            present = [name for name in (place, *place.other_names()) if name.key in self.stored.names]
            found = present[0] if present else place
            used |= {name.key for name in present}
            expected = shapes[place.key][(0 if found.layer is not None or place.layer is None else 1) :]
            problems |= self._problem(found.key, expected, place.key in vocabulary)
            for piece in tensor.pieces:
                pieces[piece.hf_name].append((found, piece))
        problems |= {name: f"holds {name}, which is no part of this model" for name in self._strangers(used)}
        if problems:
            lines = [f"{self.path}: {text}" for text in list(problems.values())[:20]]
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            move_ = f"the checkpoint and {self.config_folder / 'config.json'} are of different models; use a pair"
            raise CheckpointError("\n".join([*lines, *more, move_]))
        return pieces

    def _problem(self, key: str, expected: tuple[int, ...], is_padded: bool) -> dict[str, str]:
        if key not in self.stored.names:
            return {key: f"{key} {list(expected)} is missing"}
        found = self.stored.shape(key)
        fits = found == expected or (is_padded and found[1:] == expected[1:] and found[0] >= expected[0])
        return {} if fits else {key: f"{key} has shape {list(found)}, config.json says {list(expected)}"}

    def _strangers(self, used: set[str]) -> list[str]:
        others = set(self.stored.names) - used
        return sorted(key for key in others if not key.startswith(_TRAINING) and not key.endswith(OBJECT_SUFFIXES))
