"""Who takes how many bytes of a rank in each stage of a step: the tenants of residency, and what stages work with.

Stages and places come from residency's own tables (`residency.schedule`), so that a plan predicts what a run does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarlhf.config.runs import AnyRun, OnlineRun, PPORun, RewardModelRun, SFTRun, update_says_start
from megarlhf.loop.planner.activations import forward_bytes, stage_activations
from megarlhf.loop.planner.cache import cache_bytes, packed_bytes, rollout_bytes
from megarlhf.loop.planner.gpus import GPU
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.loop.planner.sizes import copy_bytes, model_bytes
from megarlhf.loop.planner.workload import Workload
from megarlhf.parallel.grid import Coordinates, Grid
from megarlhf.residency.schedule import Sharing, all_of, homes, stages
from megarlhf.residency.stages import CACHE, PACKED, WEIGHTS, Place, Stage, Tenant, timeline

BATCH_BYTES = 40
"""Of the batch record, per token, on the host of every rank (records/experience.py)."""
AVERAGE_BYTES = 4
"""Of a running average, per parameter, on the host."""
_MODEL_OF = {"logp": "actor", "reference": "actor", "reward": "reward", "value": "critic"}


@dataclass(frozen=True)
class StageBytes:
    """One stage on one rank."""

    name: str
    tenants: Mapping[Tenant, int]
    """On the device."""
    working: Mapping[str, int]
    """On the device while the stage runs: activations, logits, buckets."""
    host: int
    disk: int

    @property
    def device(self) -> int:
        """All of it."""
        return sum(self.tenants.values()) + sum(self.working.values())


@dataclass(frozen=True)
class Ranks:
    """What the bytes of a rank depend on, beside its number."""

    settings: AnyRun
    models: Mapping[str, PlannedModel]
    work: Workload
    world_size: int
    gpu: GPU
    bucket_bytes: int = 0
    """Buffers of the reshard at once (`ReshardSummary.peak_extra_bytes`)."""
    _rows: dict[tuple, list[StageBytes]] = field(default_factory=dict)

    def stages_of(self, rank: int) -> list[StageBytes]:
        """The stages of a step on a rank. Ranks at the same places in all layouts are alike but for their number."""
        places = {name: self.place(name, rank) for name in self.models}
        key = tuple(_alike(self.models[name], at) for name, at in places.items())
        if key not in self._rows:
            self._rows[key] = self._stages(places)
        return self._rows[key]

    def place(self, name: str, rank: int) -> Coordinates:
        """Where a rank sits in a model's layout."""
        return Grid(self.models[name].layout, self.world_size).coordinates(rank)

    def dp(self, name: str) -> int:
        """Data-parallel ranks of a model."""
        return self.models[name].layout.dp(self.world_size)

    def _stages(self, places: Mapping[str, Coordinates]) -> list[StageBytes]:
        waits, steps, fixed = self._schedule()
        sizes = self._sizes(places)
        host = BATCH_BYTES * self.work.tokens + self._averages(places)
        found = []
        for occupancy in timeline(steps, waits):
            where = {tenant: fixed.get(tenant, place) for tenant, place in occupancy.places.items()}
            held = {tenant: sizes.get(tenant, 0) for tenant, place in where.items() if place == "device"}
            away = {
                place: sum(sizes.get(one, 0) for one, at in where.items() if at == place) for place in ("host", "disk")
            }
            name = occupancy.stage.name
            found.append(StageBytes(name, held, self._working(name, places), away["host"] + host, away["disk"]))
        return found

    def _schedule(self) -> tuple[dict[Tenant, Place], tuple[Stage, ...], dict[Tenant, Place]]:
        """(where tenants wait, the stages, where those stay that are exchanged into another module and never move)."""
        if not isinstance(self.settings, OnlineRun):
            return self._offline_schedule()
        sharing = sharing_of(self.settings, self.models)
        waits = homes(self.settings)
        reference = Tenant("reference", WEIGHTS)
        fixed = {reference: waits[reference]} if reference in waits else {}
        reward = Tenant("reward", WEIGHTS)
        if sharing.reward_in_critic:
            fixed[reward] = waits[reward]
        return waits, stages(waits, sharing, scores_start=not update_says_start(self.settings)), fixed

    def _offline_schedule(self) -> tuple[dict[Tenant, Place], tuple[Stage, ...], dict[Tenant, Place]]:
        (name,) = self.models
        waits: dict[Tenant, Place] = dict.fromkeys(all_of(name), "device")
        steps = [Stage(f"learn_{name}", all_of(name))]
        has_reference = not isinstance(self.settings, SFTRun | RewardModelRun) and not self.settings.reference.url
        if has_reference and not self.models[name].lora.rank:
            reference = Tenant("reference", WEIGHTS)
            waits[reference] = "host"
            return waits, (Stage("reference", (Tenant(name, WEIGHTS),)), *steps), {reference: "host"}
        return waits, tuple(steps), {}

    def _sizes(self, places: Mapping[str, Coordinates]) -> dict[Tenant, int]:
        found: dict[Tenant, int] = {}
        for name, model in self.models.items():
            size = model_bytes(model, places[name], self.dp(name))
            whole = all_of(name)
            found |= dict(zip(whole, (size.weights, size.gradients, size.optimizer), strict=True))
            if name == "actor":
                found[Tenant("reference", WEIGHTS)] = size.parameters
        if "generator" in self.models:
            model, at = self.models["generator"], places["generator"]
            slots = self.work.slots(self.dp("generator"))
            found[Tenant("generator", CACHE)] = cache_bytes(
                model, at.pp, slots, self.work.length, on_gpu=self.gpu.is_gpu
            )
            packs = not self.gpu.is_gpu and self.work.response >= 8
            found[Tenant("generator", PACKED)] = packed_bytes(model, at) if packs else 0
        return found

    def _averages(self, places: Mapping[str, Coordinates]) -> int:
        """Running averages of the actor: one that is exported, one that is the reference and replaces its snapshot."""
        if not isinstance(self.settings, OnlineRun):
            return 0
        count = model_bytes(self.models["actor"], places["actor"], self.dp("actor")).num_parameters
        follows = self.settings.reference.follow_rate > 0
        return count * AVERAGE_BYTES * ((self.settings.actor.average_decay > 0) + follows)

    def _working(self, stage: str, places: Mapping[str, Coordinates]) -> dict[str, int]:
        if stage == "reshard":
            return {"buckets": self.bucket_bytes}
        if stage == "generate":
            return self._generating(places)
        name = _MODEL_OF.get(stage, stage.removeprefix("learn_"))
        model, dp = self.models[name], self.dp(name)
        copies = {"FP8 copies": copy_bytes(model, places[name], trains=stage == f"learn_{name}")}
        if stage != f"learn_{name}":
            return {"activations": forward_bytes(model, self.work.score_load(model, dp))} | copies
        load = self.work.update_load(model, dp)
        found = stage_activations(model, places[name].pp, load)
        return {"activations": found.total - found.head, "logits": found.head} | copies

    def _generating(self, places: Mapping[str, Coordinates]) -> dict[str, int]:
        model, at = self.models["generator"], places["generator"]
        return {
            "rollout": rollout_bytes(model, at.pp, self.work, self.dp("generator")),
            "FP8 copies": copy_bytes(model, at, trains=False),
        }


def _alike(model: PlannedModel, at: Coordinates) -> tuple[int, ...]:
    """What a rank's bytes of a model depend on; tensor ranks differ in the optimizer's part of experts only."""
    if not model.is_trained:
        return (at.pp,)
    return (at.pp, at.dp, at.cp, *([at.tp] if model.architecture.mixture else []))


def sharing_of(settings: OnlineRun, models: Mapping[str, PlannedModel]) -> Sharing:
    """Which models live in the module of another, as the run decides it (`loop.housing.reward_lives_in_critic`)."""
    is_shared = False
    if isinstance(settings, PPORun) and "reward" in models and "critic" in models:
        reward, critic = models["reward"], models["critic"]
        same = (reward.layout, reward.dtype) == (critic.layout, critic.dtype)
        is_alike = same and reward.architecture == critic.architecture and not critic.lora.rank
        is_alike = is_alike and settings.critic.new_head != "always"
        is_shared = is_alike and homes(settings)[Tenant("reward", WEIGHTS)] != "device"
    return Sharing(is_shared, settings.residency.generator == "view")
