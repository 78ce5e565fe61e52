"""Sends packed micro-batches through a model's pipeline stages with megatron-core's schedules.

Learner and scorer share this pass: it decides which rows a data-parallel rank takes, packs them, pads the number of
micro-batches so that all ranks run the same schedule, and hands the last stage's hidden states to a head.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megarlhf import device
from megarlhf.models.build import Model
from megarlhf.models.forward import packed_forward
from megarlhf.parallel.context import stream_multiple
from megarlhf.parallel.rows import share
from megarlhf.records.experience import Experience
from megarlhf.records.packing import PackedRows, pack, pack_rows
from megarlhf.records.spans import Reads, Spans

Head = Callable[[torch.Tensor, "MicroBatch"], tuple]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch packed into one stream; `rows` is empty in one that only keeps a rank in step with the others."""

    rows: tuple[int, ...]
    packed: PackedRows
    part: int = 0
    """Which of several batches that are trained on together the rows belong to."""


def plan_rows(
    spans: Spans, dp: int, max_tokens: int, units: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Rows by data-parallel rank and micro-batch, each list equally long: short ranks get empty micro-batches.

    The rows of one of `units` stay in one micro-batch. By default the rows of a family do, whose prompt is then
    computed once, as far as `max_tokens` lets them; and where it makes the busiest rank less busy, a family is cut into
    equal parts. Every rank computes the same plan for all rows, so no collective is needed and no rank waits for a
    micro-batch that its neighbour does not have.
    """
    choices = [units] if units is not None else [_families(spans, max_tokens, parts) for parts in _cuts(spans, dp)]
    sizes = [[spans.num_tokens(unit) for unit in choice] for choice in choices]
    shares = [share(each, dp) for each in sizes]
    busiest = [
        max(sum(tokens[unit] for unit in mine) for mine in ranks) for tokens, ranks in zip(sizes, shares, strict=True)
    ]
    chosen = busiest.index(min(busiest))
    units, plan = choices[chosen], []
    for mine in shares[chosen]:
        bins = pack([sizes[chosen][unit] for unit in mine], max_tokens)
        plan.append([[row for i in bin for row in units[mine[i]]] for bin in bins])
    longest = max(len(bins) for bins in plan)
    return [bins + [[]] * (longest - len(bins)) for bins in plan]


def _cuts(spans: Spans, dp: int) -> list[int]:
    """Into how many parts families might be cut: powers of two, up to rows alone."""
    largest = max(Counter(spans.families).values(), default=1)
    return sorted({1} if dp == 1 else {1, largest, *(2**i for i in range(largest.bit_length()))})


def _families(spans: Spans, max_tokens: int, parts: int) -> list[list[int]]:
    """Rows that share a prompt, by `parts` or more equal parts of each family, of `max_tokens` at most where a row is
    not longer by itself."""
    units = []
    for rows in _rows_by(spans.families):
        if len(rows) == 1:
            units.append(rows)
            continue
        own = [spans.lengths[row] - spans.prompts[row] for row in rows]
        room = max(max_tokens - spans.prompts[rows[0]], 1)
        for part in share(own, min(parts, len(rows))):
            units += [[rows[part[i]] for i in bin] for bin in pack([own[i] for i in part], room)]
    return sorted(units)


def _rows_by(keys: Sequence[int]) -> list[list[int]]:
    """Rows of the same key, in the order in which keys first appear."""
    found: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return list(found.values())


def group_units(experience: Experience) -> list[list[int]]:
    """Rows by prompt group, in the order in which groups first appear: siblings that a loss reads together."""
    return _rows_by(experience.group.tolist())


def shares_prompts(model: Model) -> bool:
    """Whether rows of a micro-batch that begin with the same prompt have its hidden states in common.

    Not with experts, whose routers count the tokens of whole rows, to balance them while training; they are scored as
    they are trained, as a rounding that sends a token to another expert is no longer small. Not while there is dropout,
    which each row draws for itself.
    """
    has_dropout = model.config.hidden_dropout > 0 or model.config.attention_dropout > 0
    return model.tally is None and not (has_dropout and any(chunk.training for chunk in model.chunks))


def micro_batches(
    experience: Experience,
    model: Model,
    max_tokens: int,
    *,
    keeps_groups: bool = False,
    reads: Reads = "rows",
) -> list[MicroBatch]:
    """This rank's share of `experience`, which all ranks of its shard hold, packed to at most `max_tokens` tokens each,
    and padding where ranks need equal shares of a stream, or linears a multiple of tokens.

    A prompt that several rows of a micro-batch begin with is computed once (`shares_prompts`), and no token that comes
    after the last that is read. With `keeps_groups` the siblings of a prompt are in one micro-batch, which may then be
    larger. Collective over the shards, which take as many micro-batches each.
    """
    groups, layout = model.groups, model.groups.layout
    rows = groups.rows
    units = group_units(experience) if keeps_groups else None
    # Routers of experts count whole rows.
    spans = Spans.of(experience, "rows" if model.tally else reads, shares_prompts=shares_prompts(model))
    plan = plan_rows(spans, rows.size(), max_tokens, units)
    multiple = stream_multiple(layout) * model.token_multiple
    mine = plan[rows.rank()]
    if groups.shard.count > 1:
        mine = mine + [[]] * (int(groups.shard.largest(torch.tensor(len(mine)))) - len(mine))
    if layout.vp > 1:  # the interleaved schedule takes them by pp
        mine = mine + [[]] * (-len(mine) % layout.pp)
    packed = [pack_rows(experience, rows, multiple, spans) if rows else _filler(multiple) for rows in mine]
    return [MicroBatch(tuple(rows), stream.to(device.current())) for rows, stream in zip(mine, packed, strict=True)]


def _filler(num_tokens: int) -> PackedRows:
    """A stream of `num_tokens` tokens that nothing is read from."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return PackedRows(
        rows=(),
        input_ids=torch.zeros(1, num_tokens, dtype=torch.int64),
        position_ids=torch.arange(num_tokens)[None],
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        prefixes=(),
        max_seqlen=num_tokens,
        logit_positions=nothing,
        targets=nothing,
        target_positions=nothing,
        last_positions=nothing,
        num_valid=(),
        num_padding=num_tokens,
    )


def run_pass(
    model: Model,
    chunks: Sequence[torch.nn.Module],
    batches: list[MicroBatch],
    head: Head,
    *,
    train: bool,
    complete_gradients: bool = False,
) -> list:
    """Runs every micro-batch through the stages (collective over the model's groups).

    `head(hidden, micro_batch)` runs on the last stage only. Training: it returns (loss, metrics) and gradients are
    summed over micro-batches, never averaged. Scoring: it returns any value. The list of metrics or values, one per
    micro-batch, is returned on the last stage; other stages get an empty list. With `complete_gradients` every rank
    ends with whole gradients; otherwise each data-parallel rank has the shard that its optimizer steps.
    """
    groups = model.groups
    iterators = [iter(batches) for _ in chunks]
    schedule = get_forward_backward_func(pp_size=groups.layout.pp, vp_size=len(chunks) if len(chunks) > 1 else None)
    communicator = {"p2p_communicator": P2PCommunicator(groups.pp, model.config)} if groups.layout.pp > 1 else {}
    return schedule(
        forward_step_func=lambda iterator, chunk: _forward_step(model, next(iterator), chunk, head, train),
        data_iterator=iterators,
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=1,  # stages tell each other the real shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
        pg_collection=groups.collection,
        force_all_reduce=complete_gradients,
        **communicator,
    )


def _forward_step(model: Model, batch: MicroBatch, chunk: torch.nn.Module, head: Head, train: bool):
    counted_rows = len(batch.rows) if train and model.tally else 0
    hidden = packed_forward(chunk, batch.packed, counted_rows, batch.packed.num_padding, batch.packed.prefixes)
    if train:
        return hidden, lambda output: _summed_loss(*head(output, batch))
    return hidden, lambda output, non_loss_data: head(output, batch)


def _summed_loss(loss: torch.Tensor, metrics: dict) -> tuple[torch.Tensor, torch.Tensor, dict]:
    # Three values and calculate_per_token_loss: megatron-core then leaves the loss as it is. The losses here are
    # already divided by the denominator of the whole minibatch.
    return loss, torch.ones((), dtype=torch.int), metrics
