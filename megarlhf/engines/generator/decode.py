"""Runs tokens through one stage's layers, step by step (see steps.py), with attention over the cache.

Tokens are a flat stream [N]; hidden states are [N, 1, H], as in packed training. The two kinds of pass differ in their
attention only: prefill (whole prompts, causal) and decode (one token of each active slot against the cache).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.device import labelled
from megarlhf.engines.generator.cache import Cache
from megarlhf.engines.generator.steps import Steps
from megarlhf.models.attention import causal_attention, masked_attention
from megarlhf.models.build import Model

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [N, heads/tp, D], key [N, kv_groups/tp, D], value [N, kv_groups/tp, D]) -> [N, heads/tp * D]."""


@dataclass(frozen=True)
class Prefilled:
    """Whole prompts after one pass."""

    blocks: torch.Tensor
    """Keys and values [layers, 2, P, kv_groups/tp, L, D], zeros after a prompt's end."""
    hidden: torch.Tensor
    """Hidden states [P, 1, H] of the last tokens (complete on the last stage only)."""

    def keep(self, prompt: int, length: int) -> "Prefilled":
        """A copy of one prompt."""
        return Prefilled(self.blocks[:, :, [prompt], :, :length], self.hidden[[prompt]])


@labelled("sample")
def prefill(model: Model, steps: Sequence[Steps], prompts: Sequence[Sequence[int]]) -> Prefilled:
    """Runs whole prompts, packed without padding. Collective over the model's tensor and pipeline groups."""
    device = next(model.chunks[0].parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(lengths)).to(device)
    places, layers = rows * longest + positions, []

    def pad(flat: torch.Tensor) -> torch.Tensor:
        padded = flat.new_zeros(len(prompts) * longest, *flat.shape[1:])
        padded[places] = flat
        return padded.view(len(prompts), longest, *flat.shape[1:]).transpose(1, 2)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = pad(key), pad(value)
        layers.append(torch.stack([keys, values]))
        context = causal_attention(pad(query), keys, values, steps[layer].scoring)
        return context.transpose(1, 2).flatten(0, 1)[places].flatten(1)

    hidden = _run_stage(model, steps, tokens, positions, attend)
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    blocks = torch.stack(layers) if layers else hidden.new_zeros(0, 2, len(prompts), 1, longest, 1)
    return Prefilled(blocks, hidden[ends])


@labelled("sample")
def decode(
    model: Model, steps: Sequence[Steps], cache: Cache, tokens: torch.Tensor, lengths: torch.Tensor, longest: int
) -> torch.Tensor:
    """Hidden states [A, 1, H] after one more token of each active slot; collective as `prefill`.

    `tokens` [A] are appended to the cache, where `lengths` [A] tokens are; `longest` is max(lengths) + 1.
    """
    windows = {step.scoring.window for step in steps}
    masks = {window: _mask(lengths, longest, window, cache.blocks.dtype) for window in windows}
    rows = torch.arange(len(tokens), device=tokens.device)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cache.append(layer, key, value, rows, lengths)
        keys, values = cache.read(layer, len(tokens), longest)
        # the heads that share a group become its query positions: no repeated keys
        grouped, scoring = query.unflatten(1, (keys.shape[1], -1)), steps[layer].scoring
        return masked_attention(grouped, keys, values, masks[scoring.window], scoring).flatten(1)

    return _run_stage(model, steps, tokens, lengths, attend)


def _mask(lengths: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[A, 1, 1, longest]: 0 for the cached tokens that the token at `lengths` [A] sees, -inf for the others."""
    places = torch.arange(longest, device=lengths.device)
    unseen = places > lengths[:, None]
    if window is not None:
        unseen |= places <= lengths[:, None] - window
    mask = torch.zeros(unseen.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(unseen, -torch.inf)[:, None, None]


def _run_stage(
    model: Model, steps: Sequence[Steps], tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Embeds or receives, runs this stage's layers, sends or normalises: hidden states [N, 1, H]."""
    (chunk,) = model.chunks
    groups = model.groups
    if groups.is_first_stage:
        hidden = chunk.embed(tokens[None], positions[None])
    else:
        hidden = torch.empty(len(tokens), 1, model.config.hidden_size, dtype=model.dtype, device=tokens.device)
        dist.recv(hidden, src=_neighbour(model, -1), group=groups.pp)
    hidden = _run_layers(steps, hidden, chunk.rotary(positions)[:, :, 0], attend, model.token_multiple)
    if groups.is_last_stage:
        return chunk.decoder.final_layernorm(hidden)
    dist.send(hidden.contiguous(), dst=_neighbour(model, 1), group=groups.pp)
    return hidden


def _neighbour(model: Model, offset: int) -> int:
    return dist.get_global_rank(model.groups.pp, model.groups.coordinates.pp + offset)


def _run_layers(
    steps: Sequence[Steps], hidden: torch.Tensor, angles: torch.Tensor, attend: Attend, multiple: int
) -> torch.Tensor:
    """Linears see a multiple of `multiple` tokens: zeros are appended, which stay zeros, and attention is without them.

    So no scale that tokens share depends on them.
    """
    num_tokens = len(hidden)
    turns = [(each.cos().to(hidden.dtype), _signed(each.sin().to(hidden.dtype))) for each in angles]
    hidden = _padded(hidden, multiple)
    for index, step in enumerate(steps):
        with step.precision():
            query, key, value = (heads[:num_tokens, 0] for heads in step.heads(step.input_norm(hidden)))
            query, key = (_rotate(heads, *turns[step.rope_place]) for heads in (query, key))
            context = attend(index, query, key, value)[:, None]
            hidden = hidden + step.project(_padded(context, multiple))
            hidden = hidden + step.mlp(step.mlp_norm(hidden))
    return hidden[:num_tokens]


def _padded(tokens: torch.Tensor, multiple: int) -> torch.Tensor:
    """[N, 1, ...] followed by zeros, up to a multiple of tokens."""
    missing = -len(tokens) % multiple
    return torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])]) if missing else tokens


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Sines [N, 1, R] as they multiply the exchanged halves: the first half's are negative."""
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R numbers of heads [N, heads, D] by their tokens' angles [N, 1, R]; `sin` as from `_signed`.

    RoFormer, equation 34, in halves, not pairs.
    """
    turned, kept = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = (turned * cos).add_(torch.cat([second, first], -1).mul_(sin))
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned
