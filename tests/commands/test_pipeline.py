"""The three stages of InstructGPT as three commands: demonstrations, a reward model from there, PPO from both."""

import json
import random
from pathlib import Path

import pytest
import yaml

from tests.commands.test_ppo import launch
from tests.learning.toy import ANSWER_TOKENS, answer, metrics, random_prompt, write_actor, write_prompts, write_rows

BATCHES = {"batch_size": 8, "max_tokens": 16}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A model that knows nothing, demonstrations of favoured answers, and preferences for them."""
    root, rng = tmp_path_factory.mktemp("pipeline"), random.Random(0)
    write_actor(root / "base")
    shown = [{"prompt": random_prompt(rng), "response": answer(rng, ANSWER_TOKENS)} for _ in range(64)]
    write_rows(root / "demonstrations.jsonl", shown)
    pairs = [
        {"prompt": random_prompt(rng), "chosen": answer(rng, ANSWER_TOKENS), "rejected": answer(rng, 0)}
        for _ in range(64)
    ]
    write_rows(root / "preferences.jsonl", pairs)
    write_prompts(root / "prompts.jsonl", count=8)
    return root


def run(root: Path, command: str, settings: dict) -> list[dict[str, float]]:
    """The metrics of `megarlhf COMMAND` on two ranks, which must end well."""
    folder = root / command
    recipe = root / f"{command}.yaml"
    recipe.write_text(yaml.safe_dump({**settings, "run": {"dir": str(folder), **settings.get("run", {})}}))
    done = launch(command, str(recipe), ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "status.json").read_text()) == {"code": 0, "reason": "done"}
    return metrics(folder)


def test_three_commands_lead_from_a_base_model_to_a_policy(root):
    optimizer = {"learning_rate": 3e-3}
    sft = run(
        root,
        "sft",
        {
            "actor": {"model": str(root / "base"), "train": {"tp": 2, "sp": True}, "optimizer": optimizer},
            "data": {"path": str(root / "demonstrations.jsonl"), "epochs": 2, **BATCHES},
        },
    )
    assert sft[-1]["loss/sft_avg"] < sft[0]["loss/sft_avg"] - 0.5
    rm = run(
        root,
        "rm",
        {
            "reward": {"model": str(root / "sft/hf"), "train": {"pp": 2}, "optimizer": optimizer},
            "data": {"path": str(root / "preferences.jsonl"), "epochs": 2, **BATCHES},
        },
    )
    assert rm[0]["loss/reward_avg"] == pytest.approx(0.6931, abs=1e-3), "a new head knows nothing"
    last = [row["rewards/accuracy"] for row in rm[-4:]]  # of 8 pairs each
    assert sum(last) / len(last) > 0.9
    config = json.loads((root / "rm/hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["num_labels"] == 1
    ppo = run(
        root,
        "ppo",
        {
            "actor": {"model": str(root / "sft/hf"), "train": {"pp": 2}, "optimizer": optimizer},
            "critic": {"train": {"tp": 2}},
            "reward": {"model": str(root / "rm/hf")},
            "rollout": {"batch_size": 8, "max_new_tokens": ANSWER_TOKENS + 1},
            "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
            "run": {"steps": 2},
        },
    )
    assert ppo[0]["objective/kl"] == pytest.approx(0, abs=1e-3), "the reference is what sft left"
    assert ppo[0]["objective/scores"] > rm[-1]["rewards/rejected"], "sft already answers as the reward model likes"
    assert ppo[0]["val/num_eos_tokens"] >= 0 and "loss/value_avg" in ppo[1]
    assert (root / "ppo/hf/model.safetensors").exists()
