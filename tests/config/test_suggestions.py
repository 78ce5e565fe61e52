"""A name that is no setting is answered with the one that was meant, or with what there is, never with a detour."""

import pytest

from megarlhf.config.fields import dotted_names
from megarlhf.config.load import load_leniently
from megarlhf.config.runs import COMMANDS
from megarlhf.config.suggestions import OTHER_NAMES


@pytest.mark.parametrize(
    ("command", "flag", "told"),
    [
        ("ppo", "--actor.optimizer.lr", "did you mean actor.optimizer.learning_rate?"),
        ("ppo", "--lr", "did you mean actor.optimizer.learning_rate or critic.optimizer.learning_rate?"),
        ("grpo", "--rollout.n", "did you mean rollout.samples_per_prompt?"),
        ("grpo", "--num_generations", "did you mean rollout.samples_per_prompt?"),
        ("grpo", "--algorithm.beta", "did you mean algorithm.kl_coef?"),
        ("dpo", "--beta", "did you mean algorithm.beta?"),
        ("dpo", "--algorithm.lambda", "accepted here: loss, beta,"),
        ("sft", "--num_train_epochs", "did you mean data.epochs?"),
        ("sft", "--max_steps", "did you mean run.steps?"),
        ("grpo", "--max_steps", "did you mean run.steps?"),
        ("grpo", "--actr.model", "did you mean actor.model?"),
        ("grpo", "--actor.optimizer.zzzz", "accepted here: learning_rate,"),
        ("grpo", "--actor.train", "it is a section; accepted in it: tp,"),
        ("grpo", "--rank", "did you mean --ranks?"),
        ("grpo", "--gpus", "did you mean --ranks?"),
        ("grpo", "--actor.rank", "did you mean actor.lora.rank?"),
    ],
)
def test_the_setting_that_was_meant_is_named(command, flag, told):
    (found,) = load_leniently(COMMANDS[command], None, [flag, "2"], own_flags=("--ranks",))[1]
    assert found.startswith(f"{flag}: no such setting; {told}")


def test_the_flags_of_a_command_are_no_keys_of_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("rankz: 2\n")
    (found,) = load_leniently(COMMANDS["grpo"], tmp_path / "mine.yaml", [], own_flags=("--ranks",))[1]
    assert "did you mean" not in found


def test_other_trainers_words_lead_to_settings_that_there_are():
    leaves = {name.rpartition(".")[2] for kind in COMMANDS.values() for name in dotted_names(kind)}
    assert {word for words in OTHER_NAMES.values() for word in words} - leaves == {"ranks"}
