"""What a user can get wrong, as one table: each is told before anything is loaded, with exit code 2 and the way out.

Rows of data files are in tests/data, what rewards return in tests/rewards, damaged checkpoints in tests/checkpoints.
"""

import pytest
import yaml

from megarlhf.cli import main
from tests.learning.toy import write_actor, write_prompts
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("malformed")
    write_actor(root / "actor")
    write_llama(root / "other_words", num_labels=1, vocab_size=90)
    write_prompts(root / "prompts.jsonl", count=8)
    (root / "held").mkdir()
    (root / "held/metrics.jsonl").write_text('{"step": 1}\n')
    return root


def checked(root, capsys, flags: str, command: str = "ppo") -> tuple[int, str]:
    """Exit code and errors of `megarlhf check` on a good recipe with these flags."""
    settings = {
        "actor": {"model": str(root / "actor")},
        "reward": {"functions": ["length"]},
        "rollout": {"batch_size": 8, "max_new_tokens": 6},
        "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"dir": str(root / "run")},
    }
    (root / f"{command}.yaml").write_text(yaml.safe_dump(settings))
    words = flags.replace("ROOT", str(root)).split()
    code = main(["check", command, str(root / f"{command}.yaml"), *words])
    return code, capsys.readouterr().err


TABLE = {
    "M18 no such file": ("--data.prompts ROOT/nowhere.jsonl", ["data.prompts", "ROOT/nowhere.jsonl"]),
    "M31 batch over ranks": ("--ranks 3 --rollout.batch_size 8", ["rollout.batch_size: 8", "3 data-parallel", "9"]),
    "M33 ranks and layout": ("--ranks 3 --actor.train.tp 2", ["tp 2 * pp 1 * cp 1 = 2 ranks", "the 3 launched"]),
    "M34 heads": ("--ranks 3 --actor.train.tp 3", ["actor.train", "tp 3", "4"]),
    "M35 layers": ("--ranks 4 --actor.train.pp 4", ["actor.train", "pp 4", "3"]),
    "M37 sp without tp": ("--actor.train.sp true", ["actor.train.sp", "needs tp > 1"]),
    "M39 temperature": ("--rollout.temperature 0", ["rollout.temperature: 0.0", "more than 0"]),
    "M39 top_p": ("--rollout.top_p 1.5", ["rollout.top_p: 1.5", "at most 1"]),
    "M39 top_k": ("--rollout.top_k -1", ["rollout.top_k: -1", "0 or more"]),
    "M39 max_new_tokens": ("--rollout.max_new_tokens 0", ["rollout.max_new_tokens: 0", "1 or more"]),
    "M40 rate": ("--actor.optimizer.learning_rate -1", ["actor.optimizer.learning_rate: -1.0", "more than 0"]),
    "M40 gamma": ("--algorithm.gamma 1.5", ["algorithm.gamma: 1.5", "between 0 and 1"]),
    "M40 target": ("--algorithm.kl_controller adaptive --algorithm.kl_target 0", ["algorithm.kl_target: 0.0"]),
    "M41 unknown": ("--actor.optimizer.learnig_rate 1", ["no such setting", "actor.optimizer.learning_rate?"]),
    "M41 type": ("--rollout.batch_size many", ["rollout.batch_size", "expected a whole number", "'many'"]),
    "M43 checkpoint": ("--run.resume ROOT/nothing", ["run.resume", "ROOT/nothing", "holds no whole checkpoint"]),
    "M52 another run": ("--run.dir ROOT/held", ["run.dir", "already holds a run (metrics.jsonl)", "run.overwrite"]),
    "M52 a file": ("--run.dir ROOT/prompts.jsonl", ["run.dir", "is a file; choose a folder"]),
    "M57 no model": ("--actor.model ROOT/held", ["actor.model", "config.json"]),
    "M58 tokenizers": ("--reward.model ROOT/other_words", ["reward.model", "tokenizer"]),
    "M59 no score head": ("--reward.model ROOT/actor", ["reward.model", "without a score head"]),
    "profile": ("--run.steps 3 --run.profile 2 4", ["run.profile: step 4", "run.steps 3", "choose steps from 1 to 3"]),
    "profile 0": ("--run.profile 0", ["run.profile", "steps from 1 on"]),
    "deadline": ("--run.save_before_minutes -1", ["run.save_before_minutes: -1.0", "0 or more"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_told_with_its_setting_and_a_way_out(root, capsys, name):
    flags, words = TABLE[name]
    code, err = checked(root, capsys, flags)
    assert code == 2, err
    missing = [word for word in words if word.replace("ROOT", str(root)) not in err]
    assert not missing, err
    assert "Traceback" not in err


def test_one_response_has_no_group(root, capsys):
    code, err = checked(root, capsys, "--rollout.samples_per_prompt 1", "grpo")
    assert code == 2 and "rollout.samples_per_prompt" in err


def test_all_of_several_mistakes_are_told_at_once(root, capsys):
    flags = "--rollout.temperature 0 --data.prompts ROOT/nowhere.jsonl --run.dir ROOT/held"
    _, err = checked(root, capsys, flags)
    assert len(err.strip().splitlines()) >= 3


def test_the_good_recipe_is_good(root, capsys):
    assert checked(root, capsys, "--ranks 2") == (0, "")
