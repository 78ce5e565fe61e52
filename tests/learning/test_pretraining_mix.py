"""PPO with a pretraining mix earns what plain PPO earns, and forgets less of the language it knew."""

import random
from pathlib import Path

import pytest
import torch

from megarlhf.config.corpus import Corpus
from megarlhf.config.layout import Layout
from megarlhf.config.runs import SFTRun
from megarlhf.config.settings import (
    PPO,
    Actor,
    CorpusRun,
    Critic,
    Data,
    Optimizer,
    PPORun,
    Pretraining,
    Reward,
    Rollout,
    Run,
    Trainee,
)
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import ANSWER_TOKENS, metrics, train, write_actor, write_prompts, write_rows

ALPHABET = "NOPQRSTUVWXYZ"
STEPS = 25


def language(num_texts: int, seed: int) -> list[str]:
    """Walks through an alphabet that the task neither asks for nor rewards."""
    rng = random.Random(seed)
    starts = [rng.randrange(len(ALPHABET)) for _ in range(num_texts)]
    return ["".join(ALPHABET[(start + step) % len(ALPHABET)] for step in range(16)) for start in starts]


def language_loss(folder: Path) -> float:
    """Nats per token of the language, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(language(32, seed=1))["input_ids"])
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """An actor that has learned the language."""
    root = tmp_path_factory.mktemp("mix")
    write_prompts(root / "prompts.jsonl")
    corpus = write_rows(root / "language.jsonl", [{"text": text} for text in language(128, seed=0)])
    actor = Trainee(model=str(write_actor(root / "actor")), optimizer=Optimizer(learning_rate=5e-3))
    data = Corpus(corpus, batch_size=16, epochs=4, max_tokens=32, append_eos=False)
    settings = SFTRun(actor=actor, data=data, run=CorpusRun(dir=str(root / "sft"), tensorboard=False))
    run_on_ranks(2, train, "sft", settings)
    assert language_loss(root / "sft/hf") < 0.1
    return root


def ppo(toy: Path, folder: Path, coef: float) -> tuple[float, float]:
    """(mean score of the last steps, language loss of the exported policy)."""
    settings = PPORun(
        actor=Actor(model=str(toy / "sft/hf"), train=Layout(tp=2), optimizer=Optimizer(learning_rate=3e-3)),
        critic=Critic(optimizer=Optimizer(learning_rate=3e-3)),
        reward=Reward(functions=("tests.learning.toy:favoured_share",)),
        algorithm=PPO(kl_coef=0.0, num_epochs=2),
        pretraining=Pretraining(
            path=str(toy / "language.jsonl"), coef=coef, batch_size=8, max_tokens=32, append_eos=False
        ),
        rollout=Rollout(batch_size=32, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=STEPS, tensorboard=False),
    )
    run_on_ranks(2, train, "ppo", settings)
    scores = [row["objective/scores"] for row in metrics(folder)]
    return sum(scores[-5:]) / 5, language_loss(folder / "hf")


def test_the_mix_keeps_the_language_at_equal_reward(toy, tmp_path):
    plain_score, plain_loss = ppo(toy, tmp_path / "plain", 0.0)
    mixed_score, mixed_loss = ppo(toy, tmp_path / "mixed", 1.0)
    assert min(plain_score, mixed_score) > 0.7
    assert abs(plain_score - mixed_score) < 0.15
    assert mixed_loss < 0.3 * plain_loss
