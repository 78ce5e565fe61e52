"""Ranges and arithmetic are checked without a model, and each sentence names a value that works."""

import itertools
from dataclasses import replace

import pytest

from megarlhf.config.check import RANGES, layouts, ranks_needed, require_valid, violations, warnings
from megarlhf.config.corpus import Corpus
from megarlhf.config.fields import dotted_names
from megarlhf.config.layout import Layout
from megarlhf.config.load import load
from megarlhf.config.runs import COMMANDS, SFTRun
from megarlhf.config.settings import CorpusRun, PPORun, Trainee
from megarlhf.errors import ConfigError

NEEDED = "--actor.model m --data.prompts p.jsonl --reward.functions length".split()


def settings(flags: str = "") -> PPORun:
    return load(PPORun, None, [*NEEDED, *flags.split()])


@pytest.fixture(scope="module")
def plain() -> PPORun:
    return settings()


def test_capsules_that_their_checkpoints_take_along_are_warned_of():
    kept = "--run.checkpoint_every 1 --run.keep_capsules 3 --run.keep_checkpoints"
    for few in (1, 2, 3):
        (told,) = warnings(settings(f"{kept} {few}"))
        assert told.startswith("run.keep_capsules: 3, but") and "set that to 4 or more" in told
    for flags in (f"{kept} 4", f"{kept} 0", "--run.keep_capsules 3", "--run.checkpoint_every 1"):
        assert warnings(settings(flags)) == []


def with_value(section, sections: list[str], name: str, value: float):
    """Settings with one value changed, some sections down."""
    if not sections:
        return replace(section, **{name: value})
    below = with_value(vars(section)[sections[0]], sections[1:], name, value)
    return replace(section, **{sections[0]: below})


def test_a_plain_run_is_fine(plain):
    assert violations(plain, world_size=1) == []
    require_valid(plain)


@pytest.mark.parametrize(
    "flag",
    [
        "rollout.temperature 0",
        "rollout.temperature -1",
        "rollout.top_p 0",
        "rollout.top_p 1.1",
        "rollout.top_k -1",
        "rollout.max_new_tokens 0",
        "rollout.batch_size 0",
        "actor.optimizer.learning_rate 0",
        "critic.optimizer.learning_rate -1e-6",
        "actor.optimizer.beta2 1",
        "algorithm.kl_coef -0.1",
        "algorithm.clip_low -0.2",
        "algorithm.gamma 1.01",
        "algorithm.lambda -0.5",
        "algorithm.target_kl -1",
        "algorithm.kl_target 0",
        "algorithm.num_minibatches 0",
        "run.steps 0",
    ],
)
def test_a_number_out_of_range_is_named_with_what_is_accepted(plain, flag):
    name, value = flag.split()
    *sections, last = name.replace("lambda", "lambda_").split(".")
    (found,) = violations(with_value(plain, sections, last, float(value)))
    head, told = found.split(" ")[:2]
    assert head == f"{name}:" and float(told) == float(value) and "choose a value that is" in found


def test_a_run_over_a_data_set_may_be_limited_to_some_steps():
    """0, the default, is no limit there."""
    run = SFTRun(actor=Trainee(model="folder"), data=Corpus(path="rows.jsonl"))
    assert violations(run) == violations(replace(run, run=CorpusRun(steps=3, profile=(3,)))) == []
    (found,) = violations(replace(run, run=CorpusRun(steps=-1)))
    assert found == "run.steps: -1 is out of range; choose a value that is 0 or more"
    (found,) = violations(replace(run, run=CorpusRun(steps=3, profile=(2, 4))))
    assert found == "run.profile: step 4 is beyond run.steps 3; choose steps from 1 to 3"


def test_zero_turns_the_optional_limits_off():
    zeros = "reward_clip value_clip target_kl kl_coef missing_eos_penalty".split()
    assert violations(settings(" ".join(f"--algorithm.{name} 0" for name in zeros))) == []


def test_every_range_belongs_to_a_setting():
    assert set(RANGES) <= {name for run in COMMANDS.values() for name in dotted_names(run)}


def test_what_is_missing_is_all_told_at_once():
    found = violations(PPORun())
    assert [sentence.partition(":")[0] for sentence in found] == ["actor.model", "data.prompts", "reward"]
    with pytest.raises(ConfigError) as caught:
        require_valid(PPORun())
    assert caught.value.violations == tuple(found)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--actor.train.tp 0", "actor.train.tp: 0 is out of range; choose 1 or more"),
        ("--actor.train.sp", "actor.train.sp: sequence parallelism needs tp > 1"),
        ("--critic.train.vp 2", "critic.train.vp: 2 virtual stages need pp > 1"),
        ("--actor.train.first_stage_layers 2", "actor.train.first_stage_layers: 2 needs pp > 1 and vp 1"),
        ("--actor.train.pp 2 --actor.train.last_stage_layers -1", "actor.train.last_stage_layers: -1 is out of range"),
        ("--actor.generate.ep 2", "actor.generate.ep: 2 does not divide tp 1"),
        ("--actor.generate.tp 2 --actor.generate.sp", "actor.generate: sp, vp and cp serve training only"),
        ("--actor.generate.cp 2", "actor.generate: sp, vp and cp serve training only"),
        ("--reward.weights 1 2", "reward.weights: 2 weights for 1 sources of reward; give 1 or none"),
        ("--rollout.min_new_tokens 65", "rollout.min_new_tokens: 65 is more than rollout.max_new_tokens 64"),
        ("--rollout.batch_size 2 --algorithm.num_minibatches 4", "algorithm.num_minibatches: 4 minibatches"),
        ("--algorithm.kl_controller adaptive --algorithm.kl_horizon 3", "algorithm.kl_horizon: 3 episodes are too few"),
        ("--actor.optimizer.min_learning_rate 1", "actor.optimizer.min_learning_rate: 1.0 is more than learning_rate"),
    ],
)
def test_what_does_not_fit_together_is_explained(flags, found):
    assert any(sentence.startswith(found) for sentence in violations(settings(flags)))


def test_a_data_set_is_checked_with_its_command():
    def found(command: str, flags: str) -> list[str]:
        return violations(load(COMMANDS[command], None, flags.split()))

    assert [line.partition(":")[0] for line in found("rm", "")] == ["reward.model", "data.path"]
    given = "--reward.model m --data.path d.jsonl"
    assert found("rm", given) == []
    assert found("rm", f"{given} --negatives.share 2")[0].startswith("negatives.share: 2.0 is out of range")
    assert found("sft", "--actor.model m --data.path d --data.batch_size 0")[0].startswith("data.batch_size: 0 is out")
    regression = f"{given} --algorithm.loss regression"
    contradiction = found("rm", f"{regression} --negatives.share 0.5 --algorithm.read_at divergence")
    assert [line.partition(":")[0] for line in contradiction] == ["negatives.share", "algorithm.read_at"]


def test_options_of_an_algorithm_that_contradict_are_told():
    (found,) = violations(load(COMMANDS["grpo"], None, [*NEEDED, "--rollout.samples_per_prompt", "1"]))
    assert found.startswith("rollout.samples_per_prompt: 1 response has no siblings")


def test_a_layout_that_is_not_given_follows_the_documented_model():
    chosen = settings("--actor.train.tp 2 --reward.model rm")
    assert layouts(chosen)["critic.train"] == layouts(chosen)["reward.train"] == Layout(tp=2)
    chosen = replace(chosen, critic=replace(chosen.critic, train=Layout(pp=2)))
    assert layouts(chosen)["reward.train"] == Layout(pp=2)
    assert "reward.train" not in layouts(settings())


def test_ranks_that_hold_no_whole_copies_get_the_launch_command():
    chosen = settings("--actor.train.tp 2 --actor.train.pp 3 --actor.generate.tp 2 --critic.train.tp 2")
    assert ranks_needed(chosen) == 6
    found = violations(chosen, world_size=4, command="ppo mine.yaml")
    assert len(found) == 1 and "tp 2 * pp 3 * cp 1 = 6 ranks" in found[0] and "the 4 launched" in found[0]
    assert "torchrun --nproc-per-node 6 -m megarlhf ppo mine.yaml" in found[0]
    assert "--nproc-per-node 12 " in violations(chosen, world_size=8)[0]
    assert len(violations(chosen, world_size=1)) == 3


def test_six_prompts_of_two_samples_fit_four_ranks():
    assert violations(settings("--rollout.batch_size 6 --rollout.samples_per_prompt 2"), world_size=4) == []


def test_five_prompts_on_four_ranks_get_numbers_and_a_value_that_works():
    found = violations(settings("--rollout.batch_size 5"), world_size=4)
    assert "5 prompts" in found[0] and "4 data-parallel ranks" in found[0] and "such as 8" in found[0]


def test_the_suggested_batch_size_always_works():
    def with_batch(size: int, num_samples: int, num_minibatches: int) -> PPORun:
        rollout = replace(base.rollout, batch_size=size, samples_per_prompt=num_samples)
        return replace(base, rollout=rollout, algorithm=replace(base.algorithm, num_minibatches=num_minibatches))

    base = settings()
    for num_samples, num_minibatches, world_size in itertools.product([1, 2, 3, 4, 6], [1, 2, 3], [1, 2, 4, 6]):
        for sentence in violations(with_batch(7, num_samples, num_minibatches), world_size):
            suggested = int(sentence.rpartition(" ")[2])
            assert suggested >= 7
            assert violations(with_batch(suggested, num_samples, num_minibatches), world_size) == []


def test_the_launch_command_is_told_beside_every_other_error():
    found = violations(settings("--actor.train.tp 2 --rollout.temperature 0 --reward.functions"), world_size=1)
    told = [line.partition(":")[0] for line in found]
    assert told == ["rollout.temperature", "reward", "actor.train", "critic.train"]
    assert "torchrun --nproc-per-node 2" in found[2]
    (found,) = violations(settings("--actor.train.tp 0 --critic.train.tp 1"), world_size=1)
    assert found.startswith("actor.train.tp: 0"), "nothing is divided by a layout of no ranks"


def test_a_seed_has_63_bits(plain):
    assert violations(settings(f"--run.seed {2**63 - 1}")) == []
    assert violations(settings(f"--run.seed {2**63}"))[0].startswith("run.seed: 9223372036854775808 is out of range")


def test_fp8_needs_layers_that_can_and_layers_a_recipe():
    from megarlhf.config.precision import FP8, precision_violations

    assert precision_violations("local", {"actor.fp8": FP8()}, "actor") == []
    assert precision_violations("emulated_fp8", {"actor.fp8": FP8("mxfp8")}, "actor") == []
    (line,) = precision_violations("local", {"actor.fp8": FP8("blockwise")}, "actor")
    assert line.startswith("actor.fp8.recipe: blockwise needs FP8 linears, and actor.layers is local")
    (line,) = precision_violations("emulated_fp8", {"actor.fp8": FP8()}, "actor")
    assert line.startswith("actor.layers: emulated_fp8 needs a recipe")
    (line,) = precision_violations("emulated_fp8", {"actor.fp8": FP8("delayed", amax_history=0)}, "actor")
    assert line == "actor.fp8.amax_history: 0 is out of range; choose 1 or more"
    assert precision_violations("te", {"actor.fp8": FP8()}, "actor") == []
    late = FP8("delayed", num_layers_at_end_in_bf16=1)
    (line,) = precision_violations("te", {"actor.fp8": late}, "actor")
    assert line.startswith("actor.fp8.num_layers_at_end_in_bf16: delayed scaling covers all layers")


def test_a_view_of_the_training_weights_is_sampled_in_their_precision(plain):
    words = "--residency.generator view --actor.layers emulated_fp8 --actor.fp8.recipe blockwise"
    assert violations(settings(words)) == []
    (line,) = violations(settings(words + " --actor.generate_fp8.recipe off"))
    assert line.startswith("residency.generator: view samples with the training model")
