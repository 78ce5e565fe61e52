"""Do layouts agree? Runs every case in a world of its own size, compares it with one process, and says what differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megarlhf import device
from megarlhf.algorithms.catalogue import ALGORITHMS
from megarlhf.config.check import layouts
from megarlhf.config.lora import LoRA
from megarlhf.config.runs import AnyRun, RewardModelRun
from megarlhf.config.settings import Critic, Trainee
from megarlhf.config.verification import Case, Verification, cases, one_process
from megarlhf.loop.frozen import frozen_batch, temperature_of
from megarlhf.loop.objectives import objective
from megarlhf.loop.roles import Role, architectures, roles
from megarlhf.loop.verification import Gaps, Measured, Trial, measure
from megarlhf.models.architecture import layout_violations
from megarlhf.records.experience import Experience

_NAMED = 6
"""Tensors that a failed case names at most."""


@dataclass(frozen=True)
class Agreement:
    """A model under a case: how far it is from one process, and whether that is within the tolerances."""

    model: str
    case: Case
    gaps: Gaps
    tolerances: Verification

    @property
    def measures(self) -> dict[str, tuple[float, float]]:
        """(difference, tolerance) by the name of what was compared."""
        gaps, allowed = self.gaps, self.tolerances
        return {
            "values" if self.model in ("critic", "reward") else "log-probs": (gaps.scores, allowed.score_tolerance),
            "loss": (gaps.loss, allowed.loss_tolerance),
            "norm": (gaps.gradient_norm, allowed.gradient_tolerance),
            "gradients": (max(gaps.gradients.values()), allowed.gradient_tolerance),
            "weights": (max(gaps.weights.values()), allowed.weight_tolerance),
        }

    @property
    def passed(self) -> bool:
        """Every difference is within its tolerance (a NaN is not), and all weights were read alike."""
        return not self.gaps.misplaced and all(gap <= allowed for gap, allowed in self.measures.values())

    @property
    def named(self) -> list[str]:
        """Why the case failed: the tensors that were read differently; else those of the first block whose output
        differs; else those whose gradients (or else updates) differ most in proportion to themselves."""
        gaps, allowed = self.gaps, self.tolerances
        if gaps.misplaced:
            return [f"{name} is read differently" for name in gaps.misplaced]
        if gaps.first_block and not self.passed:
            layer, block = gaps.first_block
            return [f"forward: the {block} of layer {layer} is the first to differ: {', '.join(gaps.block_weights)}"]
        differing = [name for name, gap in gaps.gradients.items() if not gap <= allowed.gradient_tolerance]
        differing.sort(key=gaps.own_gradients.__getitem__, reverse=True)
        if differing:
            return [f"gradient of {name}: {gaps.own_gradients[name]:.1e} of its norm" for name in differing]
        moved = [name for name, gap in gaps.weights.items() if not gap <= allowed.weight_tolerance]
        moved.sort(key=gaps.weights.__getitem__, reverse=True)
        return [f"update of {name}: {gaps.weights[name]:.1e} learning rates" for name in moved]

    @property
    def numbers(self) -> dict[str, object]:
        """For programs."""
        return {
            "model": self.model,
            "layout": self.case.name,
            "ranks": self.case.num_ranks,
            "micro_batch_tokens": self.case.micro_batch_tokens,
            "differences": {name: gap for name, (gap, _) in self.measures.items()},
            "passed": self.passed,
            "differing": self.named,
        }


def trained_roles(settings: AnyRun) -> dict[str, Role]:
    """The models that a recipe trains, whole and without dropout: adapters are left out."""
    cast = {name: role for name, role in roles(settings).items() if name in ("actor", "critic")}
    cast |= {"reward": roles(settings)["reward"]} if isinstance(settings, RewardModelRun) else {}
    return {name: replace(role, lora=LoRA(), dropout=0.0) for name, role in cast.items()}


def planned_cases(settings: AnyRun, options: Verification) -> tuple[list[Case], list[str]]:
    """The cases, and what is known to be wrong with them or with the models' folders."""
    own = {name: layout for name, layout in layouts(settings).items() if name in _layout_names(settings)}
    found, violations = cases(options, own, _section(settings, next(iter(trained_roles(settings)))).micro_batch_tokens)
    models = architectures(trained_roles(settings), violations)
    for layout, name in {case.layout: case.name for case in found}.items():
        for architecture in models.values():
            violations += layout_violations(architecture, layout, f"--layouts {name}")
    return found, list(dict.fromkeys(violations))


def _layout_names(settings: AnyRun) -> list[str]:
    return [role.setting for role in trained_roles(settings).values()]


def _section(settings: AnyRun, role: str) -> Trainee | Critic:
    return vars(settings)[role]


def agreements(
    command: str,
    settings: AnyRun,
    options: Verification,
    planned: Sequence[Case],
    tell: Callable[[Agreement], None],
) -> list[Agreement]:
    """Every trained model under every case, on the first rank, which is told each as it is found; [] on other ranks.

    Collective over the launched ranks, of which each case takes the first `num_ranks`.
    """
    worlds, algorithm, found = device.Worlds(), ALGORITHMS[command], []
    batch: list[Experience | None] = [None]
    with worlds.of(1) as is_in:
        if is_in:
            batch = [frozen_batch(settings, algorithm, next(iter(trained_roles(settings).values())), options)]
    now = algorithm.settings_now(settings.algorithm, algorithm.initial_state(settings.algorithm))
    expected: Mapping[str, Measured] = {}
    for name, role in trained_roles(settings).items():
        goal = objective(algorithm, now, role.head, temperature_of(settings))
        for case in (one_process(), *planned):
            with worlds.of(case.num_ranks) as is_in:
                if not is_in:
                    continue
                dist.broadcast_object_list(batch, src=0)
                trial = Trial(role, batch[0], goal, _section(settings, name).optimizer)
                measured = measure(trial, case, expected.get(name))
            if isinstance(measured, Gaps):
                found.append(Agreement(name, case, measured, options))
                tell(found[-1])
            elif worlds.rank == 0:
                expected = {name: measured}
    return found


def heading() -> str:
    """Head of the table."""
    columns = "".join(f"{name:>12}" for name in ("scores", "loss", "norm", "gradients", "weights"))
    return f"{'model':8}{'layout':22}{'ranks':>5}{'tokens':>8}{columns}"


def line(agreement: Agreement) -> str:
    """A row of the table, and below it what a failed case names."""
    case, named = agreement.case, agreement.named
    columns = "".join(f"{gap:>11.1e}{' ' if gap <= most else '!'}" for gap, most in agreement.measures.values())
    row = f"{agreement.model:8}{case.name:22}{case.num_ranks:>5}{case.micro_batch_tokens:>8}{columns}"
    if agreement.passed:
        return f"{row}  pass"
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return "\n".join([f"{row}  FAIL", *(f"    {words}" for words in named[:_NAMED] + more)])
