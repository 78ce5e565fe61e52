"""Runs tokens through one stage's layers, step by step (see steps.py), with attention over the cache.

Tokens are a flat stream [N]; hidden states are [N, 1, H], as in packed training. The two kinds of pass differ in their
attention only: prefill (whole prompts, causal) and decode (one token of each active slot against the cache).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.device import labelled
from megarlhf.engines.generator.attention import attention_over
from megarlhf.engines.generator.cache import Cache
from megarlhf.engines.generator.steps import Steps
from megarlhf.models.attention import causal_attention
from megarlhf.models.build import Model

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, heads [N, kv_groups/tp, heads of a group + 2, D] as in steps.py, rotated) -> [N, heads/tp * D]."""


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
        return padded.view(len(prompts), longest, *flat.shape[1:])

    def attend(layer: int, heads: torch.Tensor) -> torch.Tensor:
        query = pad(heads[:, :, :-2]).flatten(2, 3).transpose(1, 2)
        layers.append(pad(heads[:, :, -2:]).permute(3, 0, 2, 1, 4))
        context = causal_attention(query, *layers[-1], steps[layer].scoring)
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
    places = cache.places(lengths)
    num_heads = model.config.num_attention_heads // model.groups.tp.size()
    attention = attention_over(cache, [step.scoring for step in steps], num_heads, lengths, longest)

    def attend(layer: int, heads: torch.Tensor) -> torch.Tensor:
        cache.append(layer, heads[:, :, -2:], places)
        return attention(layer, heads[:, :, :-2])

    return _run_stage(model, steps, tokens, lengths, attend)


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
    turns = [_turn(each, hidden.dtype) for each in angles]
    hidden = _padded(hidden, multiple)
    for index, step in enumerate(steps):
        with step.precision():
            heads = step.heads(step.input_norm(hidden))[:num_tokens]
            _rotate(heads[:, :, :-1], *turns[step.rope_place])
            hidden.add_(step.project(_padded(attend(index, heads)[:, None], multiple)))
            hidden.add_(step.mlp(step.mlp_norm(hidden)))
    return hidden[:num_tokens]


def _padded(tokens: torch.Tensor, multiple: int) -> torch.Tensor:
    """[N, 1, ...] followed by zeros, up to a multiple of tokens."""
    missing = -len(tokens) % multiple
    return torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])]) if missing else tokens


def _turn(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, 1, R] of angles [N, 1, R], the sines as they multiply the exchanged halves: those of the
    first half are negative."""
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = sin.chunk(2, -1)
    return cos[:, None], torch.cat([-first, second], -1)[:, None]


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the first R numbers of heads [N, groups, heads, D] by their tokens' angles, in place.

    RoFormer, equation 34, in halves, not pairs.
    """
    turned, half = heads[..., : cos.shape[-1]], cos.shape[-1] // 2
    exchanged = turned.roll(half, -1).mul_(sin)
    turned.mul_(cos).add_(exchanged)
