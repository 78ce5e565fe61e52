"""What the tests of this room share: packing plain id lists, building a loaded model, transformers' own answer."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.models.forward import packed_forward
from megarlhf.parallel.groups import Groups, build_groups
from megarlhf.weights.load import load_weights
from tests import tiny

EXACT = {"dtype": torch.float32, "attn_implementation": "eager"}
"""How transformers loads a model to compare with: its default attention of 4.57 leaves out Gemma 2's soft-cap."""
LENGTHS = (7, 1, 12, 4)


@dataclass(frozen=True)
class Stream:
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


def random_rows(lengths=LENGTHS, vocab_size: int = tiny.VOCAB, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def stream(rows: list[torch.Tensor]) -> Stream:
    sizes = torch.tensor([0] + [len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return Stream(torch.cat(rows)[None], positions[None], sizes.cumsum(0).int(), int(sizes.max()))


def load(folder: Path, groups: Groups, head: str = "vocabulary", dtype=torch.float32, **settings) -> Model:
    model = build_model(Architecture.from_folder(folder), groups, head=head, dtype=dtype, seed=None)
    load_weights(model, folder, **settings)
    return model


def load_on_rank(world_size: int, folder: Path, layout: Layout, head: str = "vocabulary") -> Model:
    return load(folder, build_groups(layout, world_size), head)


def through_stages(model: Model, packed: Stream) -> torch.Tensor | None:
    """Hidden states on the last stage (None elsewhere), passing activations by plain send and receive."""
    groups, chunk = model.groups, model.chunks[0]
    ranks = groups.ranks("pp")
    stage, length = groups.coordinates.pp, packed.input_ids.shape[1]
    if not groups.is_first_stage:
        shape = (length // groups.layout.tp if groups.layout.sp else length, 1, model.config.hidden_size)
        received = torch.empty(shape)
        dist.recv(received, ranks[stage - 1])
        chunk.set_input_tensor(received)
    hidden = packed_forward(chunk, packed)
    if groups.is_last_stage:
        return hidden
    dist.send(hidden.detach().contiguous(), ranks[stage + 1])
    return None


def reference_logits(folder: Path, rows: list[torch.Tensor]) -> torch.Tensor:
    """transformers' logits (or scores of each position), row by row without padding: [N, V] or [N, 1]."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if config.architectures[0].endswith("ForSequenceClassification"):
        judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **EXACT).eval()
        with torch.no_grad():
            return torch.cat([judge.score(judge.model(row[None]).last_hidden_state)[0] for row in rows])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **EXACT).eval()
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in rows])
