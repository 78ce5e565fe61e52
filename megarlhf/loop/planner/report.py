"""A plan in words and tables, for a terminal; the same numbers as plain values, for programs."""

from collections.abc import Mapping, Sequence

from megarlhf.config.runs import OnlineRun
from megarlhf.loop.planner.plan import GIB, Plan, total_seconds
from megarlhf.loop.planner.reshard import Link, ReshardSummary
from megarlhf.loop.planner.stages import StageBytes
from megarlhf.models.precision.linears import Linears
from megarlhf.residency.stages import Tenant

MIB = 2**20


def text(plan: Plan) -> str:
    """Everything about a plan."""
    parts = [_head(plan)]
    if plan.stages:
        parts += [_stage_table(plan), _beside(plan)]
        parts += [_reshard_lines(plan.reshard)] if plan.reshard else []
        parts += [_time_table(plan)]
    if plan.violations:
        parts.append("\n".join(["Rules that these settings break:", *(f"  {line}" for line in plan.violations)]))
    return "\n\n".join([*parts, verdict(plan)])


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def verdict(plan: Plan) -> str:
    """Fits or not, in a sentence; what to change if not."""
    question = plan.question
    if plan.violations:
        number = len(plan.violations)
        return f"Cannot run: {counted(number, 'rule')} {'is' if number == 1 else 'are'} broken."
    room = f"{question.memory_gib:g} GiB, of which {question.reserve_gib:g} are kept free"
    worst = max(plan.stages, key=lambda stage: stage.device)
    where = f"{_gib(worst.device)} in stage {worst.name} on rank {plan.fullest[worst.name]}"
    if plan.fits:
        return f"Fits: the fullest moment is {where}, of {room}."
    return "\n".join([f"Does not fit: {where}, of {room}.", *(f"  {line}" for line in advice(plan, worst))])


def advice(plan: Plan, worst: StageBytes) -> list[str]:
    """What would make room in the fullest stage, the largest first."""
    found: list[tuple[int, str]] = []
    models = plan.cast.models
    for tenant, size in worst.tenants.items():
        if tenant.part == "cache":
            found.append((size // 2, "halve rollout.max_slots: fewer sequences are decoded at once"))
        elif tenant.model == "generator":
            found.append((size, "residency.generator: freed, so that its weights exist while sampling only"))
        elif worst.name != f"learn_{tenant.model}" and tenant.part != "weights":
            found.append((size, f"residency.idle: host (or residency.{tenant}), so that it waits on the host"))
    trained = models.get(worst.name.removeprefix("learn_"))
    if trained is not None:
        activations = worst.working.get("activations", 0)
        if trained.recompute != "full":
            found.append(
                (activations * 3 // 4, f"{trained.name}.recompute: full, so that layers keep their inputs only")
            )
        found.append((activations // 2, f"halve {trained.name}.micro_batch_tokens ({trained.micro_batch_tokens})"))
        sizes = sum(size for tenant, size in worst.tenants.items() if tenant.model == trained.name)
        found.append((sizes // 2, f"double tp or pp of {trained.setting} ({trained.layout}), or use more ranks"))
    found.sort(key=lambda pair: -pair[0])
    return list(dict.fromkeys(f"up to {_gib(size)}: {line}" for size, line in found if size > GIB / 100))


def _head(plan: Plan) -> str:
    question, work = plan.question, plan.work
    lines = [
        f"megarlhf {question.command} on {counted(question.world_size, 'rank')} of {question.gpu.name} with "
        f"{question.memory_gib:g} GiB (an estimate; nothing was loaded)"
    ]
    for name, model in plan.cast.models.items():
        dp = "-" if question.world_size % model.layout.model_ranks else model.layout.dp(question.world_size)
        extra = f", recompute {model.recompute}" if model.is_trained and model.recompute != "none" else ""
        extra += _layers(model.linears)
        adapters = f", LoRA rank {model.lora.rank}" if model.lora.rank else ""
        lines.append(
            f"  {name:9} {model.architecture.family} {model.architecture.num_layers} layers of "
            f"{model.architecture.hidden_size}, {model.dtype}, {model.layout} dp{dp}{extra}{adapters}"
        )
    lines += [f"  sizes from {file}" for file in plan.cast.files]
    sampled = f", of {work.prompt} + {work.response} tokens" if work.prompt else f", of {work.response} tokens"
    lines.append(
        f"  a step: {counted(work.rows, 'sequence')}{sampled} at the longest, "
        f"{counted(work.updates, 'update')}{_shards(plan)}"
    )
    return "\n".join(lines)


def _shards(plan: Plan) -> str:
    """How a batch in parts is held."""
    settings, held = plan.question.settings, plan.work.shards
    asked = settings.rollout.shards if isinstance(settings, OnlineRun) else 1
    if asked == 1:
        return ""
    fewer = f" (rollout.shards {asked}: no more can be held apart by these layouts)" if held < asked else ""
    return f"; in {counted(held, 'shard')} of {counted(plan.question.world_size // held, 'rank')}{fewer}"


def _layers(linears: Linears) -> str:
    """What stands in a model's line when its layers are not megatron-core's local ones."""
    if linears.layers == "te":
        return ", layers te" + (f" in FP8 {linears.fp8.recipe}" if linears.fp8.is_on else "")
    return ", emulated FP8 (whose copies are not counted)" if linears.fp8.is_on else ""


def _stage_table(plan: Plan) -> str:
    """Rows are tenants and what stages work with, columns are stages; of the fullest rank of each stage."""
    stages = plan.stages
    unit, size = ("GiB", GIB) if plan.peak_bytes >= GIB / 2 else ("MiB", MIB)
    tenants = list(dict.fromkeys(tenant for stage in stages for tenant in stage.tenants))
    working = list(dict.fromkeys(name for stage in stages for name in stage.working))
    rows = [[f"{unit}, fullest rank", *(stage.name for stage in stages)]]
    rows += [[str(tenant), *(_cell(stage.tenants.get(tenant), size) for stage in stages)] for tenant in tenants]
    rows += [[f"({name})", *(_cell(stage.working.get(name), size) for stage in stages)] for name in working]
    rows.append(["all on the device", *(_cell(stage.device, size) for stage in stages)])
    if any(stage.host for stage in stages):
        rows.append(["on the host", *(_cell(stage.host, size) for stage in stages)])
    if any(stage.disk for stage in stages):
        rows.append(["on disk", *(_cell(stage.disk, size) for stage in stages)])
    return _table([row for row in rows if any(cell not in ("", "-", "0.00") for cell in row[1:])])


def _beside(plan: Plan) -> str:
    lines = [
        f"Host memory: {_gib(plan.host_bytes)} a rank, {_gib(plan.host_node_bytes)} a node of "
        f"{min(plan.question.gpu.gpus_per_node, plan.question.world_size)}."
    ]
    for name in plan.exports:
        lines.append(
            f"On disk, {name}: {_gib(plan.exports[name])} as a Hugging Face folder, {_gib(plan.states[name])} with the "
            "optimizer's state."
        )
    return "\n".join(lines)


def _reshard_lines(found: ReshardSummary) -> str:
    lines = [
        f"Reshard: {_gib(found.bytes_moved)} between ranks in {found.num_messages} messages, {found.num_buckets} "
        f"buckets; buffers of at most {found.peak_extra_bytes / MIB:.1f} MiB a rank."
    ]
    ways: dict[Link, str] = {"node": "within nodes", "network": "between nodes"}
    for link, words in ways.items():
        sent, received = found.sent[link], found.received[link]
        if sum(sent):
            lines.append(f"  {words}: {_gib(sum(sent))}; a rank sends {_range(sent)} and receives {_range(received)}")
    lines.append(f"  copied within ranks: {_range(found.copied_bytes)}")
    return "\n".join(lines)


def reshard_text(found: ReshardSummary, gpus_per_node: int) -> str:
    """All numbers of a reshard, rank by rank."""
    checked = "checked: every element of the target is written exactly once" if found.is_validated else "not checked"
    head = [
        f"{_gib(found.bytes_moved)} between {counted(len(found.copied_bytes), 'rank')} ({gpus_per_node} a node), "
        f"{found.num_messages} messages in {found.num_buckets} buckets",
        f"largest bucket {found.largest_bucket_bytes / MIB:.2f} MiB at one end; peak extra "
        f"{found.peak_extra_bytes / MIB:.2f} MiB a rank",
        checked,
    ]
    rows = [["rank, MiB", "copied", "sent in node", "sent beyond", "received in node", "received beyond"]]
    columns = [found.copied_bytes, found.sent["node"], found.sent["network"]]
    columns += [found.received["node"], found.received["network"]]
    for rank, numbers in enumerate(zip(*columns, strict=True)):
        rows.append([str(rank), *(f"{number / MIB:.2f}" for number in numbers)])
    return "\n".join([*head, "", _table(rows)])


def links_text(found: ReshardSummary) -> str:
    """Bytes of every pair of ranks that talk, most first."""
    pairs = sorted(found.pairs.items(), key=lambda item: (-item[1], item[0]))
    rows = [["link", "MiB"], *([f"{giver} -> {taker}", f"{size / MIB:.2f}"] for (giver, taker), size in pairs)]
    return _table(rows)


def _time_table(plan: Plan) -> str:
    gpu = plan.question.gpu
    rows = [["time of a step", "likely (best to worst)"]]
    rows += [[name, str(seconds)] for name, seconds in plan.seconds.items()]
    rows.append(["all", str(total_seconds(plan.seconds))])
    notes = [
        f"Assumed: {gpu.flops / 1e12:.4g} TFLOP/s bfloat16 (25 to 55 % reached, 40 likely), "
        f"{gpu.memory_bandwidth / 1e12:.3g} TB/s memory (45 to 85 %, 65), "
        f"{gpu.node_bandwidth / 1e9:.3g} GB/s in a node and {gpu.network_bandwidth / 1e9:.3g} GB/s beyond "
        f"(40 to 85 %, 65), from {gpu.source}.",
        "Every sequence at its longest; no overlap of communication; rewards of functions and servers, moves to the "
        "host, data and saving not counted. Not yet compared with a run on GPUs.",
    ]
    return "\n".join([_table(rows), *notes])


def as_dict(plan: Plan) -> dict[str, object]:
    """Plain values: bytes and seconds."""
    question = plan.question
    return {
        "command": question.command,
        "ranks": question.world_size,
        "gpu": question.gpu.name,
        "memory_gib": question.memory_gib,
        "fits": plan.fits,
        "violations": list(plan.violations),
        "peak_bytes": plan.peak_bytes,
        "stages": [_stage_dict(stage, plan.fullest[stage.name]) for stage in plan.stages],
        "host_bytes_per_rank": plan.host_bytes,
        "host_bytes_per_node": plan.host_node_bytes,
        "export_bytes": dict(plan.exports or {}),
        "state_bytes": dict(plan.states or {}),
        "reshard": reshard_dict(plan.reshard) if plan.reshard else None,
        "seconds": {name: vars(found) for name, found in (plan.seconds or {}).items()},
    }


def reshard_dict(found: ReshardSummary) -> dict[str, object]:
    """Plain values of a reshard."""
    return {
        "bytes_moved": found.bytes_moved,
        "num_messages": found.num_messages,
        "num_buckets": found.num_buckets,
        "largest_bucket_bytes": found.largest_bucket_bytes,
        "peak_extra_bytes": found.peak_extra_bytes,
        "is_validated": found.is_validated,
        "copied_bytes": list(found.copied_bytes),
        "sent_bytes": {link: list(amounts) for link, amounts in found.sent.items()},
        "received_bytes": {link: list(amounts) for link, amounts in found.received.items()},
        "links": [[giver, taker, size] for (giver, taker), size in sorted(found.pairs.items())],
    }


def _stage_dict(stage: StageBytes, rank: int) -> dict[str, object]:
    def named(sizes: Mapping[Tenant, int] | Mapping[str, int]) -> dict[str, int]:
        return {str(name): size for name, size in sizes.items()}

    return {
        "stage": stage.name,
        "rank": rank,
        "device_bytes": stage.device,
        "host_bytes": stage.host,
        "disk_bytes": stage.disk,
        "tenants": named(stage.tenants),
        "working": named(stage.working),
    }


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cell(num_bytes: int | None, unit: int) -> str:
    return "-" if num_bytes is None else f"{num_bytes / unit:.2f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.1f} MiB"


def _range(amounts: Sequence[int]) -> str:
    least, most = min(amounts), max(amounts)
    return _gib(most) if least == most else f"{_gib(least)} to {_gib(most)}"
