"""The coefficient of the KL penalty as a value: fixed, or moved after each step towards a target KL."""

from dataclasses import dataclass, replace
from typing import Self

from megarlhf.config.algorithms import PolicyGradient
from megarlhf.errors import ConfigError

_MAX_ERROR = 0.2


@dataclass(frozen=True)
class FixedKL:
    """Always the same coefficient."""

    coefficient: float

    def update(self, kl: float, num_episodes: int) -> Self:
        """Itself."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2.

    coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon
    """

    coefficient: float
    target: float
    """Nats: mean over sequences of the summed KL."""
    horizon: int
    """Episodes."""

    def __post_init__(self) -> None:
        wrong = [
            f"algorithm.{name}: {value} is not usable by the adaptive KL controller; choose a number above 0"
            for name, value in (
                ("kl_coef", self.coefficient),
                ("kl_target", self.target),
                ("kl_horizon", self.horizon),
            )
            if not value > 0
        ]
        if wrong:
            raise ConfigError(wrong)

    def update(self, kl: float, num_episodes: int) -> Self:
        """The controller after a step of `num_episodes` sequences (of all ranks) whose `objective/kl` was `kl`."""
        error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        return replace(self, coefficient=self.coefficient * (1.0 + error * num_episodes / self.horizon))


KLController = FixedKL | AdaptiveKL


def kl_controller(settings: PolicyGradient) -> KLController:
    """The controller that the settings ask for, at its start. Raises ConfigError for a target or horizon of 0."""
    if settings.kl_controller == "adaptive":
        return AdaptiveKL(settings.kl_coef, settings.kl_target, settings.kl_horizon)
    return FixedKL(settings.kl_coef)
