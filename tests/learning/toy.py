"""A task that a random tiny model learns in seconds: answer with tokens of a favoured set.

Who says what is favoured: a reward model, trained here with transformers alone on random sequences to predict the share
of favoured tokens in an answer; a reward function; or a file of preferences. transformers judges what was learned.
"""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import EOS, VOCAB, tiny_config, write_llama, write_tokenizer

FAVOURED = range(20, 50)
FAVOURED_TEXT = [chr(token + 28) for token in FAVOURED]
OTHER_TEXT = [chr(token + 28) for token in range(FAVOURED.stop, 99)]
LETTERS = range(ord("a") - 28, ord("z") - 27)
"""Tokens of lower-case letters."""
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


def train(rank: int, world_size: int, command: str, settings) -> None:
    """A training command on a rank of the pool, as `megarlhf COMMAND` would run it."""
    from megarlhf.loop.launch import run_training
    from megarlhf.loop.preflight import preflight

    assert preflight(settings, world_size) == []
    run_training(command, settings, rank, world_size)


def metrics(folder: Path) -> list[dict[str, float]]:
    """metrics.jsonl of a run, one dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def favoured_share(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """The reward function of the task: the share of favoured characters."""
    return [sum(letter in FAVOURED_TEXT for letter in text) / ANSWER_TOKENS for text in responses]


def write_rows(path: Path, rows: list[dict]) -> str:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def random_prompt(rng: random.Random) -> str:
    """Lower-case letters, none of which is favoured."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_TOKENS))


def answer(rng: random.Random, num_favoured: int) -> str:
    """ANSWER_TOKENS characters, `num_favoured` of which are."""
    letters = rng.choices(FAVOURED_TEXT, k=num_favoured) + rng.choices(OTHER_TEXT, k=ANSWER_TOKENS - num_favoured)
    rng.shuffle(letters)
    return "".join(letters)


def sampled_share(folder: Path, count: int = 64) -> float:
    """Share of favoured tokens that the model in `folder` samples, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    prompts = torch.randint(LETTERS.start, LETTERS.stop, (count, PROMPT_TOKENS))
    lengths = {"max_new_tokens": ANSWER_TOKENS, "min_new_tokens": ANSWER_TOKENS}
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, **lengths)
    return float(share_of_favoured(ids[:, PROMPT_TOKENS:]).mean())


def judged(folder: Path, prompts: list[str], answers: list[str]) -> torch.Tensor:
    """Scores [B] of whole sequences, with the end token, by the reward model in `folder` under transformers; [B, K] of
    one with several labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [prompt + answer + EOS for prompt, answer in zip(prompts, answers, strict=True)]
    with torch.no_grad():
        return model(torch.tensor(tokenizer(texts)["input_ids"])).logits.squeeze(1)
