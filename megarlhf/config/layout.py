"""A layout says how one model is cut over ranks. It is a value with arithmetic; no process group is involved."""

import math
from dataclasses import dataclass

from megarlhf.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """How a model is split. What is left of the world after tp * pp * cp is data parallelism (dp)."""

    tp: int = 1
    """Tensor-parallel ranks: every linear layer and the vocabulary are cut this many ways."""
    pp: int = 1
    """Pipeline stages: the layers are cut this many ways."""
    cp: int = 1
    """Context-parallel ranks: each sequence is cut this many ways."""
    ep: int = 1
    """Expert-parallel ranks: the experts of a mixture are shared out over groups of this many of a stage's
    tp * cp * dp ranks, neighbours first. Tensor ranks cut no expert: below ep = tp some hold the same experts."""
    sp: bool = False
    """Sequence parallelism: norms and residuals hold 1/tp of the tokens. Needs tp > 1."""
    vp: int = 1
    """Virtual pipeline stages: model chunks per rank (interleaved schedule)."""
    first_stage_layers: int = 0
    """Layers of the first stage, which also holds the embedding; 0: a share like the others'."""
    last_stage_layers: int = 0
    """Layers of the last stage, which also holds the head; 0: a share like the others'."""

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the model (of its dense part, where ep spreads experts over dp)."""
        return self.tp * self.pp * self.cp

    @property
    def smallest_world(self) -> int:
        """Ranks that hold whole copies of the model, experts included; every world is a multiple of it."""
        return self.pp * math.lcm(self.tp * self.cp, self.ep)

    def dp(self, world_size: int) -> int:
        """Data-parallel copies in a world of `world_size` ranks. Raises LayoutError when it does not divide."""
        if world_size % self.model_ranks:
            raise LayoutError(
                f"{self}: {world_size} ranks cannot hold whole copies of a model cut over tp {self.tp} * pp {self.pp} "
                f"* cp {self.cp} = {self.model_ranks} ranks; launch a multiple of {self.model_ranks} ranks"
            )
        if world_size % self.smallest_world:
            raise LayoutError(
                f"{self}: ep {self.ep} does not divide the {world_size // self.pp} ranks of a stage; launch a multiple "
                f"of {self.smallest_world} ranks, or choose an ep that divides tp * cp * dp"
            )
        return world_size // self.model_ranks

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        parts += [f"{name}{value}" for name, value in (("cp", self.cp), ("ep", self.ep), ("vp", self.vp)) if value > 1]
        parts += [f"+first{self.first_stage_layers}"] if self.first_stage_layers else []
        parts += [f"+last{self.last_stage_layers}"] if self.last_stage_layers else []
        return "".join(parts) + ("+sp" if self.sp else "")
