"""A task that a random tiny model learns in seconds: answer with tokens of a favoured set, as a reward model sees it.

The reward model is trained here with transformers alone, on random sequences, to predict the share of favoured tokens
in an answer. It is then used like any other: loaded from its folder, in its own layout.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB, tiny_config, write_llama, write_tokenizer

FAVOURED = range(20, 50)
PROMPT_TOKENS = 4
ANSWER_TOKENS = 8


def share_of_favoured(token_ids: torch.Tensor) -> torch.Tensor:
    """[B] float32: the share of favoured ids in token_ids [B, S]."""
    return ((token_ids >= FAVOURED.start) & (token_ids < FAVOURED.stop)).float().mean(1)


def train_reward_model(folder: Path, steps: int = 150) -> float:
    """Write a reward model with 2 layers to `folder`; returns its root mean square error on fresh sequences."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = tiny_config(num_labels=1, num_hidden_layers=2)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**config)).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = _error(model, *_sequences(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    with torch.no_grad():
        return float(_error(model, *_sequences(256)).sqrt())


def write_actor(folder: Path) -> Path:
    """A random actor with 3 layers, so that two pipeline stages are uneven."""
    return write_llama(folder, tied=True, num_hidden_layers=3)


def write_prompts(path: Path, count: int = 64) -> None:
    """Prompts of random letters."""
    generator = torch.Generator().manual_seed(1)
    letters = torch.randint(ord("a"), ord("z") + 1, (count, PROMPT_TOKENS), generator=generator).tolist()
    rows = [json.dumps({"prompt": "".join(map(chr, row)), "id": number}) for number, row in enumerate(letters)]
    path.write_text("\n".join(rows) + "\n")


def _sequences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (count, PROMPT_TOKENS + ANSWER_TOKENS))
    favoured = torch.randint(FAVOURED.start, FAVOURED.stop, ids.shape)
    ids = torch.where(torch.rand(ids.shape) < torch.rand(count, 1), favoured, ids)
    return ids, share_of_favoured(ids[:, PROMPT_TOKENS:])


def _error(model, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (model(ids).logits[:, 0] - wanted).square().mean()
