"""Bytes that the backward pass keeps, and what the heads need beside them: of one pipeline stage of one rank.

Counted tensor by tensor from the modules that are run (models/, megatron-core's local spec), with N tokens a
micro-batch, n = N/tp with sequence parallelism else N, and columns of a tensor rank: Q of queries, K of keys (and of
values), F of the feed-forward. Of a layer's tensors these live until its backward pass, in the model's precision:

    norms           2 n H        their inputs, which are the residual stream
    linear inputs   2 n H        of query/key/value and of gate/up (sequence parallelism gathers them again)
    attention       N (Q + 2K)   the fused projection, of which the values are a view
                    N (3Q + K)   rotated queries and keys, attention's output, the input of its projection
    attention, of the C tokens of rows that share prompts
                    2 C K        keys and values, again for each row, in place of N (Q + 3K)
                    N D          cosines and sines
    feed-forward    3 N F        gate and up (2 F), the product

and a few float32 numbers a token. The way of counting is that of Korthikanti et al. (arXiv:2205.05198, section 4); the
terms are ours, because attention is fused, the feed-forward gated and dropout off.
"""

from dataclasses import dataclass

from megarlhf.loop.planner.models import PlannedModel, columns_at_work
from megarlhf.models.architecture import padded_vocab, stage_layers
from megarlhf.weights.transfers import ITEM_BYTES

LOGIT_CHUNK = 1024
"""Positions whose logits exist at once (`parallel.logprob.CHUNK_TOKENS`)."""
LOGIT_BYTES = 512 * 2**20
"""Bytes of them at most, on a GPU (`device.block_bytes`)."""
KEPT_LOGIT_BYTES = 256 * 2**20
"""Bytes of logits that wait for the backward pass, at most (`parallel.logprob.KEPT_BYTES`)."""
LOGIT_COPIES = 3
"""float32 copies of a tile of logits at the worst moment of its backward pass, with entropy: what becomes the gradient,
probabilities, the gradient in the model's precision or the slope of a soft cap."""
FORWARD_LOGIT_COPIES = 2
"""Without a backward pass: distances to the largest logit, their exponentials."""


@dataclass(frozen=True)
class Load:
    """What goes through a model in one micro-batch, at most."""

    tokens: int
    """N."""
    predicted: int
    """Positions that a head is applied to, M."""
    micro_batches: int = 1
    """Of one optimizer step, on one data-parallel rank."""
    longest: int = 0
    """Tokens of the longest row (matters for sliding windows only)."""
    attended: float = 0.0
    """Tokens that a token sees, on average."""
    copied: int = 0
    """Tokens whose keys and values attention copies: those of all rows that share their prompts, each row's whole."""


@dataclass(frozen=True)
class StageActivations:
    """What one stage of a trained model holds at the worst moment of an update."""

    kept: int
    """By autograd, for all micro-batches in flight: what torch's saved-tensor hooks see."""
    recomputed: int
    """One layer's, while its backward pass runs, on top of `kept`."""
    boundary: int
    """Outputs that were sent to the next stage and wait for their gradient."""
    head: int
    """Tiles of logits, and logits that wait for their backward pass."""

    @property
    def total(self) -> int:
        return self.kept + self.recomputed + self.boundary + self.head


def stage_activations(model: PlannedModel, pp_rank: int, load: Load) -> StageActivations:
    """The stage at pipeline rank `pp_rank` in an update.

    Context ranks are counted as if each had the whole stream: more than they hold of it, less the masks that attention
    keeps for the parts of rows.
    """
    pieces = _Layer(model, load)
    layers = [len(stage_layers(model.architecture, model.layout, pp_rank, chunk)) for chunk in range(model.layout.vp)]
    per_chunk = max(layers) * pieces.kept + _once(model, load)
    is_last = pp_rank == model.layout.pp - 1
    in_flight = chunks_in_flight(model, pp_rank, load.micro_batches)
    return StageActivations(
        kept=in_flight * per_chunk + (_last_stage(model, load, pieces) if is_last else 0),
        recomputed=pieces.recomputed if max(layers) else 0,
        boundary=0 if is_last else in_flight * pieces.residual,
        head=head_bytes(model, load) if is_last else 0,
    )


def chunks_in_flight(model: PlannedModel, pp_rank: int, micro_batches: int) -> int:
    """Micro-batches, times model chunks, whose forward pass is done before the first backward pass ends (1F1B)."""
    pp, vp = model.layout.pp, model.layout.vp
    if vp == 1:
        return min(pp - pp_rank, micro_batches)
    warm_up = (pp - pp_rank - 1) * 2 + (vp - 1) * pp
    return min(warm_up + 1, micro_batches * vp)


def head_bytes(model: PlannedModel, load: Load) -> int:
    """Beside what autograd keeps: tiles of logits, and logits that wait for their backward pass."""
    if model.head == "value":
        return 0
    rows = padded_vocab(model.architecture, model.layout) // model.layout.tp
    return LOGIT_COPIES * _tile_bytes(load, rows) + min(4 * load.predicted * rows, KEPT_LOGIT_BYTES)


def _tile_bytes(load: Load, rows: int) -> int:
    """float32 logits of `rows` of the vocabulary that exist at once."""
    return min(4 * min(LOGIT_CHUNK, load.predicted) * rows, LOGIT_BYTES)


def forward_bytes(model: PlannedModel, load: Load) -> int:
    """The most that a pass without gradients holds at once: a layer's feed-forward, or a tile of logits."""
    pieces, rows = _Layer(model, load), padded_vocab(model.architecture, model.layout) // model.layout.tp
    logits = 0 if model.head == "value" else FORWARD_LOGIT_COPIES * _tile_bytes(load, rows)
    return 2 * pieces.residual + max(pieces.feed_forward, logits)


class _Layer:
    """Bytes of one layer and micro-batch."""

    def __init__(self, model: PlannedModel, load: Load):
        architecture, layout, item = model.architecture, model.layout, ITEM_BYTES[model.dtype]
        tokens, width = load.tokens, architecture.hidden_size
        share = tokens // layout.tp if layout.sp else tokens
        size, heads = architecture.head_dim, architecture.num_heads // layout.tp
        groups = max(architecture.num_kv_groups // layout.tp, 1)
        query, key = heads * size, groups * size
        # More tensor ranks than groups: the whole projection is gathered, and the values are a view of that.
        is_gathered = layout.tp > architecture.num_kv_groups
        fused = (architecture.num_heads + 2 * architecture.num_kv_groups) * size if is_gathered else query + 2 * key
        self.residual = share * width * item
        norm = _norm(share, width, item)
        attention = tokens * item * (3 * query + size) + 4 * tokens * heads
        projected, copied = tokens * item * fused, 2 * load.copied * key * item
        # Values are a view of the projection, where they are not copied; so is what norms of heads read.
        attention += copied if load.copied else projected + tokens * item * key
        attention += projected if load.copied and architecture.qk_norm else 0
        if architecture.qk_norm:
            attention += _norm(tokens * heads, size, item)
            attention += 4 * tokens * groups  # the keys that are normed are a view of the projection
        attention += _unfused(model, load, query, key)
        self.feed_forward = int(3 * tokens * item * columns_at_work(architecture) / layout.tp) + _routed(model, tokens)
        adapters = _adapters(model, tokens) * item
        dropout = 2 * share * width if model.dropout else 0
        norms = 2 * architecture.pre_norms + 2 * architecture.post_norms
        everything = norms * norm + 2 * self.residual + attention + self.feed_forward + adapters + dropout
        self.norm = norm
        if model.recompute == "none":
            self.kept, self.recomputed = everything, 0
        elif model.recompute == "selective":
            self.kept, self.recomputed = everything - self.feed_forward, self.feed_forward
        else:
            self.kept, self.recomputed = self.residual, everything - self.residual  # its input is kept already


def _routed(model: PlannedModel, tokens: int) -> int:
    """Of a layer, on average, for each token and chosen expert: the hidden state, sorted to the experts, and what is
    inside the feed-forward once more, weighted; for each token the router's float32 input. Routing is taken to be even;
    megatron-core's indexes are left out."""
    mixture, item = model.architecture.mixture, ITEM_BYTES[model.dtype]
    if mixture is None:
        return 0
    width, tokens = model.architecture.hidden_size, tokens // model.layout.tp
    chosen = tokens * mixture.top_k * (width + mixture.ffn_hidden_size) * item
    router = 4 * tokens * width if item < 4 else 0
    return (chosen + router) * len(mixture.layers) // model.architecture.num_layers


def _unfused(model: PlannedModel, load: Load, query: int, key: int) -> int:
    """What attention keeps beyond its inputs where torch has no fused kernel for it, on average over the layers.

    Capped scores: keys and values repeated for each head, and the scores before and after the cap and the softmax, once
    in float32.
    """
    architecture, item = model.architecture, ITEM_BYTES[model.dtype]
    if architecture.attention_softcap is None:
        return 0
    windows = architecture.windows or (None,) * architecture.num_layers
    repeated = 2 * max(load.tokens, load.copied) * query * item if query != key else 0
    heads = architecture.num_heads // model.layout.tp
    seen = [min(load.longest, window or load.longest) for window in windows]
    scores = sum(load.tokens * heads * reach * (2 * item + 4) for reach in seen)
    return repeated + scores // architecture.num_layers


def _norm(rows: int, width: int, item: int) -> int:
    """Kept by an RMSNorm of [rows, width]: its input and a float32 number a row."""
    return rows * width * item + 4 * rows


def _once(model: PlannedModel, load: Load) -> int:
    """Kept once a micro-batch and chunk: token ids, or the angles that recomputed layers are given."""
    sizes = len(model.architecture.ropes) * model.architecture.head_dim
    return 8 * load.tokens + (4 * load.tokens * sizes if model.recompute == "full" else 0)


def _last_stage(model: PlannedModel, load: Load, layer: _Layer) -> int:
    """The final norm, the hidden states that the head reads, and a few numbers a position."""
    item = ITEM_BYTES[model.dtype] if model.head == "vocabulary" else 4
    return layer.norm + load.predicted * (model.architecture.hidden_size * item + 24)


def _adapters(model: PlannedModel, tokens: int) -> int:
    """Elements that a layer's adapters keep beside their linears' inputs: A x of each projection, r numbers a token."""
    return tokens * model.lora.rank * len(model.lora.targets) if model.lora.rank else 0
