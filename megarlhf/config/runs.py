"""The settings of each training command: which sections its YAML has."""

from dataclasses import dataclass

from megarlhf.config.algorithms import DPO, GRPO, KTO, RLOO, SFT, ReinforcePlusPlus, RewardModelling
from megarlhf.config.corpus import Corpus, Negatives, Statistics
from megarlhf.config.residency import Residency
from megarlhf.config.settings import (
    Actor,
    CorpusRun,
    Data,
    Optimizer,
    PPORun,
    Reference,
    Reward,
    RewardTrainee,
    Rollout,
    Run,
    Trainee,
)


@dataclass(frozen=True)
class GRPORun:
    """Settings of `megarlhf grpo`."""

    actor: Actor = Actor()
    reference: Reference = Reference()
    reward: Reward = Reward()
    algorithm: GRPO = GRPO()
    rollout: Rollout = Rollout(samples_per_prompt=8)
    data: Data = Data()
    residency: Residency = Residency()
    run: Run = Run(dir="runs/grpo")


@dataclass(frozen=True)
class RLOORun:
    """Settings of `megarlhf rloo`."""

    actor: Actor = Actor()
    reference: Reference = Reference()
    reward: Reward = Reward()
    algorithm: RLOO = RLOO()
    rollout: Rollout = Rollout(samples_per_prompt=4)
    data: Data = Data()
    residency: Residency = Residency()
    run: Run = Run(dir="runs/rloo")


@dataclass(frozen=True)
class ReinforceRun:
    """Settings of `megarlhf reinforce++`."""

    actor: Actor = Actor()
    reference: Reference = Reference()
    reward: Reward = Reward()
    algorithm: ReinforcePlusPlus = ReinforcePlusPlus()
    rollout: Rollout = Rollout()
    data: Data = Data()
    residency: Residency = Residency()
    run: Run = Run(dir="runs/reinforce++")


@dataclass(frozen=True)
class SFTRun:
    """Settings of `megarlhf sft`."""

    actor: Trainee = Trainee(optimizer=Optimizer(learning_rate=1e-5))
    algorithm: SFT = SFT()
    data: Corpus = Corpus()
    run: CorpusRun = CorpusRun(dir="runs/sft")


@dataclass(frozen=True)
class RewardModelRun:
    """Settings of `megarlhf rm`."""

    reward: RewardTrainee = RewardTrainee(optimizer=Optimizer(learning_rate=1e-5))
    algorithm: RewardModelling = RewardModelling()
    data: Corpus = Corpus()
    negatives: Negatives = Negatives()
    statistics: Statistics = Statistics()
    run: CorpusRun = CorpusRun(dir="runs/rm")


@dataclass(frozen=True)
class DPORun:
    """Settings of `megarlhf dpo`."""

    actor: Trainee = Trainee(optimizer=Optimizer(learning_rate=5e-7))
    reference: Reference = Reference()
    algorithm: DPO = DPO()
    data: Corpus = Corpus()
    run: CorpusRun = CorpusRun(dir="runs/dpo")


@dataclass(frozen=True)
class KTORun:
    """Settings of `megarlhf kto`."""

    actor: Trainee = Trainee(optimizer=Optimizer(learning_rate=5e-7))
    reference: Reference = Reference()
    algorithm: KTO = KTO()
    data: Corpus = Corpus()
    run: CorpusRun = CorpusRun(dir="runs/kto")


OnlineRun = PPORun | GRPORun | RLOORun | ReinforceRun
"""Commands that sample from the policy they train."""
OfflineRun = SFTRun | RewardModelRun | DPORun | KTORun
"""Commands that read a data set."""
AnyRun = OnlineRun | OfflineRun

COMMANDS: dict[str, type[AnyRun]] = {
    "ppo": PPORun,
    "grpo": GRPORun,
    "rloo": RLOORun,
    "reinforce++": ReinforceRun,
    "sft": SFTRun,
    "rm": RewardModelRun,
    "dpo": DPORun,
    "kto": KTORun,
}
"""Settings class of each training command."""


def update_says_start(settings: OnlineRun) -> bool:
    """Whether a step's log-probs before its update need no pass of their own.

    They are what the update's own forward says, where a step has one update, on all of its rows, and nothing reads them
    earlier: no KL penalty or report against a reference, no limit on the gap to the sampler that stops the step. With
    dropout, or with FP8 whose scales move, a training pass says something else than a scoring one.
    """
    algorithm, actor = settings.algorithm, settings.actor
    return (
        algorithm.num_epochs * algorithm.num_minibatches == 1
        and not algorithm.needs_reference
        and settings.rollout.max_logp_gap == 0
        and actor.dropout == 0
        and not actor.fp8.is_on
        and not (isinstance(settings, PPORun) and settings.algorithm.critic_warmup_steps)
    )
