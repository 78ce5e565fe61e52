"""Chooses the next token from vocabulary-parallel logits, with a few numbers per row exchanged between tensor ranks.

Plain sampling and greedy never gather logits: each rank finds its two best scores (logits / temperature plus noise) and
its share of the normaliser, and one small all-gather decides. top_k and top_p gather candidates.

A token is a near tie when rounding could have changed it: its two best scores are within 1e-3, or a token within 1e-3
of the top_k or top_p boundary (in logits, in probability) has a score that wins, or would win if it were kept.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.engines.generator.noise import exponential, gumbel, hashed, position_keys, spread, unsigned
from megarlhf.engines.generator.requests import Sampling

NEAR = 1e-3
_COLUMNS = 256
"""In a block of `_best_of`."""
_BLOCK = 1 << 18
"""Logits that a CPU works on at a time, so that intermediate results stay in its cache."""
_FINALISTS = 8
"""Tokens of a row whose noise is worked out to the end on a CPU."""
_NOTHING = -1e30
"""Score of what cannot be chosen, where -inf would not do."""
_FIRST_CANDIDATES = 1024
"""Tokens looked at for top_p before the whole vocabulary is sorted."""


@dataclass(frozen=True)
class Shard:
    """This rank's columns of the vocabulary: `width` of them from `start`, those beyond `vocab_size` are padding."""

    start: int
    width: int
    vocab_size: int
    group: dist.ProcessGroup

    @property
    def num_ranks(self) -> int:
        """Tensor ranks that share the vocabulary."""
        return self.group.size()

    def mask_padding(self, logits: torch.Tensor) -> None:
        """Sets padding columns of logits [B, V/tp] to -inf, in place."""
        logits[:, max(0, self.vocab_size - self.start) :] = -torch.inf

    def mask_ids(self, logits: torch.Tensor, rows: torch.Tensor, ids: tuple[int, ...]) -> torch.Tensor:
        """A copy of logits [B, V/tp] with vocabulary ids `ids` at -inf where `rows` [B] is true."""
        columns = [index - self.start for index in ids if self.start <= index < self.start + self.width]
        if not columns:
            return logits
        masked = logits.clone()
        masked[:, columns] = masked[:, columns].masked_fill(rows[:, None], -torch.inf)
        return masked

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        """[tp, ...] float64 from each rank's `numbers` [...]. Collective over the tensor-parallel group."""
        numbers = numbers.double()
        if self.num_ranks == 1:
            return numbers[None]
        parts = [torch.empty_like(numbers) for _ in range(self.num_ranks)]
        dist.all_gather(parts, numbers.contiguous(), group=self.group)
        return torch.stack(parts)


@dataclass(frozen=True)
class Choice:
    """One token for each row, the same on every tensor rank."""

    tokens: torch.Tensor
    """[B] int64."""
    logps: torch.Tensor
    """[B] float32, of the distribution before min_new_tokens, top_k and top_p."""
    near_ties: torch.Tensor
    """[B] bool."""


def choose(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, sampling: Sampling, shard: Shard
) -> Choice:
    """The next token of each row. Collective over the tensor-parallel group.

    logits [B, V/tp] float32 (this rank's columns; overwritten), keys [B] of the rows' noise, positions [B] of the token
    in its response.
    """
    shard.mask_padding(logits)
    if not sampling.is_greedy and sampling.temperature != 1:
        logits /= sampling.temperature
    allowed = logits
    if sampling.min_new_tokens and sampling.stop_ids:
        allowed = shard.mask_ids(logits, positions < sampling.min_new_tokens, sampling.stop_ids)
    if sampling.is_restricted:
        return _choose_restricted(allowed, logits.logsumexp(-1), keys, positions, sampling, shard)
    if sampling.is_greedy:
        best, columns = _best_of(allowed, 2)
        return _decide(allowed, logits.logsumexp(-1), best, columns, shard)
    return _choose_plain(logits, allowed, keys, positions, shard)


def _choose_plain(
    logits: torch.Tensor, allowed: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, shard: Shard
) -> Choice:
    """The greatest p / E, E exponential noise: log p plus Gumbel noise in fewer passes over the vocabulary."""
    if shard.start >= shard.vocab_size:
        allowed = logits.fill_(_NOTHING)  # a softmax of nothing but -inf is not a number
    ids = spread(torch.arange(shard.start, shard.start + shard.width, device=logits.device))
    rows = max(1, _BLOCK // shard.width) if logits.device.type == "cpu" else len(logits)
    columns = (allowed, *position_keys(keys, positions))
    parts = [_race(*some, ids) for some in zip(*(x.split(rows) for x in columns), strict=True)]
    total, best, columns = map(torch.cat, zip(*parts, strict=True))
    return _decide(allowed, total if allowed is logits else logits.logsumexp(-1), best, columns, shard)


def _race(logits: torch.Tensor, low: torch.Tensor, high: torch.Tensor, ids: torch.Tensor):
    """logsumexp [B], the two best perturbed scores [B, 2] and their columns [B, 2] of a block of rows."""
    probs = logits.softmax(-1)
    total = logits.amax(-1) - probs.amax(-1).log()
    best, columns = _two_first(probs, hashed(low, high, ids))
    return total, best.log() + total[:, None], columns


def _two_first(probs: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two greatest p / E [B, 2] of `probs` [B, W], E the exponential noise of `bits` [B, W], and their columns.

    E = -log1p(-u) is more than u, so that p / u bounds p / E without a logarithm: on a CPU only those with the greatest
    bounds get one, unless a bound that was left out exceeds the second best of them.
    """
    if probs.device.type == "cpu" and probs.shape[1] > _FINALISTS:
        bounds = unsigned(bits)
        bounds, columns = _best_of(torch.div(probs, bounds, out=bounds), _FINALISTS)
        best = (probs.gather(1, columns) / exponential(bits.gather(1, columns))).topk(2, dim=-1)
        if bool((best.values[:, 1] >= bounds[:, -1] * 2.0**32).all()):
            return best.values, columns.gather(1, best.indices)
    return _best_of(probs.div_(exponential(bits)), 2)


def _best_of(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best scores [B, count] of [B, W] and their columns; by blocks, as sorting whole rows takes long on a
    CPU."""
    if scores.shape[1] % _COLUMNS or scores.shape[1] <= count * _COLUMNS:
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
    blocks = scores.unflatten(1, (-1, _COLUMNS))
    chosen = blocks.amax(-1).topk(count, dim=-1).indices
    best = blocks.gather(1, chosen[..., None].expand(-1, -1, _COLUMNS)).flatten(1).topk(count, dim=-1)
    return best.values, chosen.gather(1, best.indices // _COLUMNS) * _COLUMNS + best.indices % _COLUMNS


def _decide(allowed: torch.Tensor, normaliser, best, columns, shard: Shard) -> Choice:
    """The best of all ranks' two best scores [B, 2] at `columns` [B, 2]. Collective over the tensor-parallel group."""
    value = allowed.gather(1, columns[:, :1])[:, 0]
    mine = torch.stack([normaliser, best[:, 0], best[:, 1], value], 0).double()
    everyone = shard.gather(torch.cat([mine, (columns[:, 0] + shard.start)[None].double()]))  # [tp, 5, B]
    owner = everyone[:, 1].argmax(0)
    _, first, _, value, token = everyone.gather(0, owner.expand(1, 5, -1))[0]
    normaliser = everyone[:, 0].logsumexp(0)
    second = everyone[:, 1:3].flatten(0, 1).topk(2, dim=0).values[1]
    return Choice(token.long(), (value - normaliser).float(), first - second < NEAR)


def _choose_restricted(allowed, normaliser, keys, positions, sampling: Sampling, shard: Shard) -> Choice:
    totals = shard.gather(torch.stack([normaliser, allowed.logsumexp(-1)])).logsumexp(0)  # [2, B] float64
    values, ids = _candidates(allowed, totals[1], sampling, shard)
    kept, doubtful = _kept(values, totals[1], sampling)
    scores = values + gumbel(keys, positions, ids).double()
    best, columns = scores.masked_fill(~kept, -torch.inf).max(-1, keepdim=True)
    rivals = (kept | doubtful) & (scores > best - NEAR)
    near = (rivals & doubtful).any(1) | (rivals.sum(1) > 1)
    logps = values.gather(1, columns)[:, 0] - totals[0]
    return Choice(ids.gather(1, columns)[:, 0], logps.float(), near)


def _candidates(allowed, total, sampling: Sampling, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    """The best values [B, C] float64 and ids [B, C], descending: all that can be kept and the first that is not."""
    if sampling.top_k:
        return _best(allowed, sampling.top_k + 1, shard)
    values, ids = _best(allowed, _FIRST_CANDIDATES, shard)
    mass = (values[:, :-1] - total[:, None]).exp().sum(1)
    if bool((mass >= sampling.top_p + NEAR).all()):
        return values, ids
    return _best(allowed, shard.vocab_size, shard)


def _best(allowed: torch.Tensor, count: int, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
    values, columns = allowed.topk(min(count, shard.width), dim=-1)
    both = shard.gather(torch.stack([values.double(), (columns + shard.start).double()]))  # [tp, 2, B, c]
    values, ids = both.permute(1, 2, 0, 3).flatten(2)
    order = values.topk(min(count, shard.vocab_size, values.shape[1]), dim=-1)
    return order.values, ids.gather(1, order.indices).long()


def _kept(values: torch.Tensor, total: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidates [B, C] top_k and top_p keep, and for which of them [B, C] rounding could decide otherwise.

    top_p works on what top_k left, normalised anew (the order of transformers' warpers): a token is kept while the
    probability of those before it is below top_p.
    """
    kept = torch.isfinite(values)
    doubtful = torch.zeros_like(kept)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
        total = values.masked_fill(~kept, -torch.inf).logsumexp(-1)
    if sampling.top_p < 1:
        probs = (values - total[:, None]).exp()
        before = probs.cumsum(1) - probs
        doubtful = kept & ((before - sampling.top_p).abs() < NEAR)
        kept &= before < sampling.top_p
    last = kept.sum(1, keepdim=True) - 1
    following = (last + 1).clamp(max=values.shape[1] - 1)
    close_to_dropped = kept & (following > last) & (values - values.gather(1, following) < NEAR)
    close_to_kept = ~kept & (values.gather(1, last) - values < NEAR)
    return kept, doubtful | close_to_dropped | close_to_kept
