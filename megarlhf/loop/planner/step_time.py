"""How long a step would take: a roofline with stated shares of the peaks, and what it leaves out.

For each stage the time of the slowest rank: multiplications at a share of the peak, plus what tensor ranks say to each
other (it is not overlapped), plus the pipeline's bubble. A decoding step reads the weights and the cache once, so it is
bound by memory; its kernels are launched one by one, which is counted for small models. Every sequence is at its
longest, and all finish together. Results of rows are brought to every rank that holds them (`rollout.shards`), whose
host goes through all of these. Left out: tokenizing, reward functions and servers, saving, the rest of the host's work;
and that a prompt which rows share is computed once. `python -m tests.benchmarks.step_time` compares with measured
steps, on CPUs.

Multiplications of a token: 2 per weight forward, 4 backward, and again 2 for what is recomputed; attention 4 * S/2 per
query column forward, for rows of S tokens. Through the head go the predicted tokens only.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from megarlhf.config.layout import Layout
from megarlhf.loop.planner.activations import Load
from megarlhf.loop.planner.gpus import BEST, GPU, LIKELY, WORST, Efficiency
from megarlhf.loop.planner.models import PlannedModel, columns_at_work
from megarlhf.loop.planner.reshard import ReshardSummary
from megarlhf.loop.planner.sizes import ModelBytes
from megarlhf.loop.planner.workload import Workload
from megarlhf.models.architecture import padded_vocab
from megarlhf.weights.transfers import ITEM_BYTES

KERNELS_PER_LAYER, KERNELS_PER_CHOICE = 30, 40
"""Launched by a decoding step for a layer, and to choose a token; counted in engines/generator."""
ROW_BYTES = 8
"""Of a sampled token (its id and the sampler's log-prob), brought to every rank; of a score 4."""
HOST_TOKEN_S = 0.27e-6
"""Of a sampled token of a shard on the host of every rank that holds it: results, records, credit, minibatches and
plans of all its rows in a PPO step, on one CPU core; `python -m tests.benchmarks.rows`."""
SHARD_SUMS = 32
"""Small sums over the shards in a PPO step of one update: 29 with a reward model and a function, 3 more an update."""
LATENCY_S = {"node": 15e-6, "network": 30e-6}
"""Of a collective over few bytes."""


@dataclass(frozen=True)
class Seconds:
    """A time: as likely as not, if all goes well, if it does not."""

    likely: float
    best: float
    worst: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.likely + other.likely, self.best + other.best, self.worst + other.worst)

    def __str__(self) -> str:
        return f"{_time(self.likely)} ({_time(self.best)} to {_time(self.worst)})"


NO_TIME = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Parts:
    """Seconds of a stage by what they go to."""

    compute: float = 0.0
    """The models' own work: multiplications, reading weights and cache, the optimizer."""
    tensor: float = 0.0
    """Sums over tensor ranks."""
    pipeline: float = 0.0
    """Waiting for other stages, and what stages send each other."""
    data: float = 0.0
    """Gradients and weights among the copies of a model."""
    moving: float = 0.0
    """Weights from the training to the generation layout."""
    rows: float = 0.0
    """Bringing the results of a shard's rows to every rank that holds it, going through them there, and sums over the
    shards."""

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """All of it."""
        return sum(astuple(self))

    @property
    def overhead(self) -> float:
        """The share of the time that is not the models' own work."""
        return 1 - self.compute / self.total if self.total else 0.0


@dataclass(frozen=True)
class Machine:
    """A GPU at one efficiency, in a world of ranks."""

    gpu: GPU
    efficiency: Efficiency
    world_size: int

    def multiply_s(self, flops: float, dtype: str) -> float:
        """Seconds of `flops` multiplications and additions."""
        peak = self.gpu.float32_flops if dtype == "float32" else self.gpu.flops
        return flops / (peak * self.efficiency.compute)

    def read_s(self, num_bytes: float) -> float:
        """Seconds to read (or write) bytes of the GPU's memory."""
        return num_bytes / (self.gpu.memory_bandwidth * self.efficiency.memory)

    def send_s(self, num_bytes: float, is_far: bool) -> float:
        """Seconds to send bytes to one other rank, in the node or beyond."""
        bandwidth = self.gpu.network_bandwidth if is_far else self.gpu.node_bandwidth
        return num_bytes / (bandwidth * self.efficiency.links)

    def sum_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce of `num_bytes` over neighbouring ranks, by rings."""
        if ranks == 1:
            return 0.0
        is_far = ranks > self.gpu.gpus_per_node
        latency = LATENCY_S["network" if is_far else "node"]
        return latency + self.send_s(2 * num_bytes * (ranks - 1) / ranks, is_far)

    def spread_s(self, num_bytes: float, ranks: int, is_far: bool) -> float:
        """Seconds until each of `ranks` has all of `num_bytes`, of which each had its share, by a ring."""
        if ranks == 1:
            return 0.0
        latency = LATENCY_S["network" if is_far else "node"]
        return (ranks - 1) * latency + self.send_s(num_bytes * (ranks - 1) / ranks, is_far)


def estimate(parts_of: Callable[[Efficiency], Parts]) -> Seconds:
    """`parts_of(efficiency)` under the three efficiencies."""
    return Seconds(*(parts_of(efficiency).total for efficiency in (LIKELY, BEST, WORST)))


def learn_s(model: PlannedModel, size: ModelBytes, work: Workload, machine: Machine) -> Parts:
    """All updates of a step on one model."""
    layout = model.layout
    dp = layout.dp(machine.world_size)
    load = work.update_load(model, dp)
    at_head = load.predicted / load.tokens
    again = {"none": 0.0, "selective": _feed_forward_share(model, at_head), "full": 1.0}[model.recompute]
    flops = _flops(model, 2 * load.attended, at_head) * (3 + again)
    multiplying = machine.multiply_s(flops * load.tokens / (layout.tp * layout.pp), model.dtype)
    talking = (2 + 1 + again) / 2 * _tensor_s(model, load, machine)
    bubble = (layout.pp - 1) / layout.vp
    trained = size.gradients  # float32, padded: 4 bytes an element
    is_far = layout.tp * dp > machine.gpu.gpus_per_node
    return Parts(
        compute=work.updates * (load.micro_batches * multiplying + machine.read_s(2 * trained + 2 * size.optimizer)),
        tensor=work.updates * load.micro_batches * talking,
        pipeline=work.updates * bubble * (multiplying + talking + 2 * _boundary_s(model, load, machine)),
        data=work.updates * machine.spread_s(trained + trained / 4 * ITEM_BYTES[model.dtype], dp, is_far),
    )


def score_s(model: PlannedModel, work: Workload, machine: Machine) -> Parts:
    """One pass over the step's rows without gradients."""
    layout = model.layout
    dp = layout.dp(machine.world_size)
    load = work.score_load(model, dp)
    flops = _flops(model, 2 * load.attended, load.predicted / load.tokens) * load.tokens / (layout.tp * layout.pp)
    multiplying, talking = machine.multiply_s(flops, model.dtype), _tensor_s(model, load, machine)
    bubble = (layout.pp - 1) / layout.vp
    return Parts(
        compute=load.micro_batches * multiplying,
        tensor=load.micro_batches * talking,
        pipeline=bubble * (multiplying + talking + _boundary_s(model, load, machine)),
        rows=_rows_s(4.0, 0.0, work, dp, layout.tp, machine),
    )


def generate_s(model: PlannedModel, size: ModelBytes, cache_bytes: int, work: Workload, machine: Machine) -> Parts:
    """All of a step's responses, each at its longest. `size` and `cache_bytes` are of the largest stage."""
    layout, architecture = model.layout, model.architecture
    dp = layout.dp(machine.world_size)
    slots, prompts = work.slots(dp), -(-work.num_prompts // dp)
    tokens = -(-work.rows // dp) / slots * work.response
    prefill = Load(min(4096, max(work.prompt, 1) * prompts), slots)
    num_prefills = max(1.0, prompts * work.prompt / prefill.tokens)
    flops = _flops(model, work.prompt, 1 / max(work.prompt, 1)) * prefill.tokens / layout.tp  # stages take turns
    mean_cache = cache_bytes * (work.prompt + work.response / 2) / work.length
    # With several stages, each reads its weights while the others wait.
    reading = layout.pp * machine.read_s(size.weights + mean_cache)
    multiplying = machine.multiply_s(_flops(model, work.length, 1.0) * slots / layout.tp, model.dtype)
    launching = machine.gpu.launch_s * (KERNELS_PER_LAYER * architecture.num_layers + KERNELS_PER_CHOICE)
    choosing = machine.read_s(16 * slots * padded_vocab(architecture, layout) / layout.tp)
    talking = layout.pp * _tensor_s(model, Load(slots, slots), machine)
    together = max if machine.gpu.overlaps else sum
    return Parts(
        compute=num_prefills * machine.multiply_s(flops, model.dtype)
        + tokens * (together((reading, multiplying, launching)) + choosing),
        tensor=num_prefills * layout.pp * _tensor_s(model, prefill, machine) + tokens * talking,
        rows=_rows_s(ROW_BYTES, HOST_TOKEN_S, work, dp, layout.tp, machine)
        + SHARD_SUMS * machine.spread_s(8 * work.shards, work.shards, is_far=True),
    )


def reshard_s(found: ReshardSummary, machine: Machine) -> Parts:
    """Nodes and network at once, the slower of both; and packing, twice."""
    moving = max(
        machine.send_s(found.busiest("node"), is_far=False), machine.send_s(found.busiest("network"), is_far=True)
    )
    packing = machine.read_s(4 * max(map(max, (*found.sent.values(), *found.received.values(), found.copied_bytes))))
    return Parts(moving=moving + packing + found.num_buckets * LATENCY_S["network"])


def _rows_s(token_bytes: float, token_s: float, work: Workload, dp: int, tp: int, machine: Machine) -> float:
    """Every rank receives all rows of its shard, however many ranks share the work; the host's part is `token_s`."""
    num_tokens, ranks = work.rows * work.response // work.shards, dp // work.shards
    is_far = tp * ranks > machine.gpu.gpus_per_node
    return machine.spread_s(num_tokens * token_bytes, ranks, is_far) + num_tokens * token_s


def _flops(model: PlannedModel, length: float, at_head: float) -> float:
    """Multiplications and additions of a token's forward pass through the whole model, in a row of `length` tokens, of
    which a share of `at_head` goes through the head."""
    architecture = model.architecture
    columns = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_groups * architecture.head_dim
    width, rows = architecture.hidden_size, architecture.vocab_size if model.head == "vocabulary" else 1
    layer = width * (2 * columns + 2 * keys) + 3 * width * columns_at_work(architecture) + length * columns
    return 2.0 * (architecture.num_layers * layer + at_head * width * rows)


def _feed_forward_share(model: PlannedModel, at_head: float) -> float:
    architecture = model.architecture
    weights = 3 * architecture.hidden_size * columns_at_work(architecture) * architecture.num_layers
    return 2.0 * weights / _flops(model, 0, at_head)


def _tensor_s(model: PlannedModel, load: Load, machine: Machine) -> float:
    """What the tensor ranks of a stage sum up in a forward pass: twice a layer. Sequence parallelism sends as much."""
    layers = -(-model.architecture.num_layers // model.layout.pp)
    num_bytes = load.tokens * model.architecture.hidden_size * ITEM_BYTES[model.dtype]
    return 2 * layers * machine.sum_s(num_bytes, model.layout.tp)


def _boundary_s(model: PlannedModel, load: Load, machine: Machine) -> float:
    if model.layout.pp == 1:
        return 0.0
    layout = model.layout
    num_bytes = load.tokens * model.architecture.hidden_size * ITEM_BYTES[model.dtype] / (layout.tp if layout.sp else 1)
    is_far = layout.tp * layout.dp(machine.world_size) >= machine.gpu.gpus_per_node
    return machine.send_s(num_bytes, is_far)


def on_layout(model: PlannedModel, layout: Layout) -> PlannedModel:
    """The same model cut another way."""
    return replace(model, layout=layout)


def _time(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
