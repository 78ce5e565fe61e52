"""Continuous batching on one data-parallel rank: slots hold the sequences in flight, a finished one's is given away.

Every rank of a model's tensor and pipeline groups takes the same decisions from the same tokens, so that nothing but
the chosen tokens has to be agreed on.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from megarlhf.device import labelled
from megarlhf.engines.generator.cache import Cache
from megarlhf.engines.generator.decode import Prefilled, decode, prefill
from megarlhf.engines.generator.noise import row_keys
from megarlhf.engines.generator.requests import Completions, Request, Sampling
from megarlhf.engines.generator.sampler import Choice, Shard, choose
from megarlhf.engines.generator.steps import head_map, layer_steps
from megarlhf.models.build import Model
from megarlhf.parallel.logprob import soft_capped

_REFILL = 8
"""Slots are refilled once 1 in so many is free: a prefill of one prompt costs nearly a whole decoding step."""


@dataclass(frozen=True)
class Group:
    """Consecutive requests (indexes) with one prompt."""

    prompt: tuple[int, ...]
    requests: tuple[int, ...]


class Flight:
    """All of one rank's requests, from the first prefill to the last token."""

    def __init__(self, model: Model, requests: Sequence[Request], sampling: Sampling, max_slots: int, max_tokens: int):
        """`max_slots` sequences at once; about `max_tokens` prompt tokens in one prefill."""
        self.num_prefilled_tokens = self.num_decode_passes = 0
        self._model, self._requests, self._sampling, self._max_tokens = model, requests, sampling, max_tokens
        self._steps = layer_steps(model, sampling.max_new_tokens)
        self._head = head_map(model, sampling.max_new_tokens) if model.groups.is_last_stage else None
        self._num_slots = min(max_slots, len(requests))
        longest = max(len(request.prompt_ids) for request in requests)
        self._cache = Cache(model, self._num_slots, longest + sampling.max_new_tokens)
        self._device = self._cache.blocks.device
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=self._device)
        self._request_keys = _keys(requests, sampling, self._device)
        self._waiting = deque(_admission_order(requests))
        self._held: Prefilled | None = None  # the last admitted prompt, while samples of it wait
        self._held_prompt: tuple[int, ...] = ()
        self._num_active = self._longest = 0
        # one column a slot, moved as a whole: last token, cached tokens, new tokens, key, request
        self._slots = torch.zeros(5, self._num_slots, dtype=torch.int64, device=self._device)
        self._log: list[tuple[torch.Tensor, Choice]] = []

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values."""
        return self._cache.num_bytes

    def run(self, follow: Callable[[int, int], None] | None = None) -> Completions:
        """Completions in the order of the requests. Collective over the model's tensor and pipeline groups.

        `follow` is told after every pass how many requests are answered, and how many there are.
        """
        while self._num_active or self._waiting:
            hidden = [self._decode()] if self._num_active else []
            if self._is_refill_due():
                hidden += self._admit()
            self._advance(self._choose(torch.cat(hidden) if len(hidden) > 1 else hidden[0]))
            if follow:
                follow(len(self._requests) - len(self._waiting) - self._num_active, len(self._requests))
        return self._completions()

    def _decode(self) -> torch.Tensor:
        tokens, lengths = self._slots[:2, : self._num_active]
        self._longest += 1
        self.num_decode_passes += 1
        hidden = decode(self._model, self._steps, self._cache, tokens, lengths, self._longest)
        lengths += 1
        return hidden

    def _is_refill_due(self) -> bool:
        free = self._num_slots - self._num_active
        return bool(self._waiting) and (self._num_active == 0 or free >= max(1, self._num_slots // _REFILL))

    def _admit(self) -> list[torch.Tensor]:
        """Fills the free slots, after the active ones; hidden states [n, 1, H] of their prompts' last tokens."""
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._num_slots - self._num_active))]
        groups = [Group(prompt, tuple(rows)) for prompt, rows in groupby(taken, self._prompt_of)]
        hidden = []
        if self._held is not None and groups[0].prompt == self._held_prompt:
            hidden.append(self._place(self._held, [groups.pop(0)]))
        for piece in self._pieces(groups):
            prefilled = prefill(self._model, self._steps, [group.prompt for group in piece])
            self.num_prefilled_tokens += sum(len(group.prompt) for group in piece)
            hidden.append(self._place(prefilled, piece))
            self._held, self._held_prompt = prefilled, piece[-1].prompt
        self._release(prompt_of_last=self._prompt_of(taken[-1]), is_new=bool(groups))
        return hidden

    def _release(self, prompt_of_last: tuple[int, ...], is_new: bool) -> None:
        """Keeps only the last prompt, and only while more samples of it wait."""
        if not self._waiting or self._prompt_of(self._waiting[0]) != prompt_of_last:
            self._held = None
        elif is_new:
            self._held = self._held.keep(-1, len(prompt_of_last))

    def _pieces(self, groups: list[Group]) -> Iterator[list[Group]]:
        """Splits `groups` so that a piece, padded to its longest prompt, has at most `max_tokens` or is one prompt."""
        piece: list[Group] = []
        for group in groups:
            longest = max(len(other.prompt) for other in [*piece, group])
            if piece and longest * (len(piece) + 1) > self._max_tokens:
                yield piece
                piece = []
            piece.append(group)
        if piece:
            yield piece

    def _place(self, prefilled: Prefilled, groups: list[Group]) -> torch.Tensor:
        """Gives each request of `groups` the next free slot with a copy of its prompt's keys and values."""
        rows = [request for group in groups for request in group.requests]
        prompts = [index for index, group in enumerate(groups) for _ in group.requests]
        slots = torch.arange(self._num_active, self._num_active + len(rows), device=self._device)
        prompts, requests = (torch.tensor(numbers, device=self._device) for numbers in (prompts, rows))
        lengths = torch.tensor([len(group.prompt) for group in groups], device=self._device)[prompts]
        zeros = torch.zeros_like(requests)
        self._cache.fill(slots, prompts, prefilled.blocks)
        self._slots[:, slots] = torch.stack([zeros, lengths, zeros, self._request_keys[requests], requests])
        self._num_active += len(rows)
        self._longest = max(self._longest, max(len(group.prompt) for group in groups))
        return prefilled.hidden[prompts]

    @labelled("sample")
    def _choose(self, hidden: torch.Tensor) -> Choice:
        """The next token of every active slot, from hidden states [A, 1, H], on every rank of the model."""
        choice = None
        if self._head is not None:
            _, _, counts, keys, _ = self._slots[:, : self._num_active]
            logits = self._logits(hidden)
            choice = choose(logits, keys, counts, self._sampling, self._shard(logits.shape[1]))
        is_alone = self._model.groups.layout.pp == 1
        return choice if is_alone else _from_last_stage(choice, self._num_active, self._model)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's [A, V/tp] float32 from hidden states [A, 1, H]."""
        logits, cap = self._head(hidden[:, 0]).float(), self._model.architecture.logit_softcap
        return logits if cap is None else soft_capped(logits, cap)

    def _shard(self, width: int) -> Shard:
        groups, architecture = self._model.groups, self._model.architecture
        return Shard(groups.coordinates.tp * width, width, architecture.vocab_size, groups.tp)

    def _advance(self, choice: Choice) -> None:
        """Notes the chosen tokens and vacates the slots of finished sequences."""
        tokens, _, counts, _, requests = self._slots[:, : self._num_active]
        self._log.append((torch.stack([requests, counts]), choice))
        tokens.copy_(choice.tokens)
        counts += 1
        done = torch.isin(tokens, self._stop_ids) | (counts >= self._sampling.max_new_tokens)
        finished = done.nonzero()[:, 0].tolist()
        for slot in reversed(finished):
            self._vacate(slot)
        if finished and self._num_active:
            self._longest = int(self._slots[1, : self._num_active].max())
        elif finished:
            self._longest = 0

    def _vacate(self, slot: int) -> None:
        # from the highest slot down, so that the last active one is never finished itself
        self._num_active -= 1
        if slot != self._num_active:
            self._cache.move(self._num_active, slot, self._longest)
            self._slots[:, slot] = self._slots[:, self._num_active]

    def _completions(self) -> Completions:
        places = torch.cat([where for where, _ in self._log], 1).cpu()
        size = (len(self._requests), self._sampling.max_new_tokens)
        tokens, logps, near = torch.full(size, -1), torch.zeros(size), torch.zeros(size, dtype=torch.bool)
        tokens[*places] = torch.cat([choice.tokens for _, choice in self._log]).cpu()
        logps[*places] = torch.cat([choice.logps for _, choice in self._log]).cpu()
        near[*places] = torch.cat([choice.near_ties for _, choice in self._log]).cpu()
        sampled = tokens >= 0
        flat = (values.masked_select(sampled) for values in (tokens, logps, near))
        return Completions.of(*flat, lengths=sampled.sum(1), stop_ids=self._sampling.stop_ids)

    def _prompt_of(self, request: int) -> tuple[int, ...]:
        return self._requests[request].prompt_ids


def _admission_order(requests: Sequence[Request]) -> list[int]:
    """Longest prompts first (alike in length, so that a prefill pads little), equal prompts next to each other."""
    first: dict[tuple[int, ...], int] = {}
    for index, request in enumerate(requests):
        first.setdefault(request.prompt_ids, index)
    return sorted(range(len(requests)), key=lambda i: (-len(requests[i].prompt_ids), first[requests[i].prompt_ids], i))


def _keys(requests: Sequence[Request], sampling: Sampling, device: torch.device) -> torch.Tensor:
    rows = torch.tensor([request.row_id for request in requests], device=device)
    samples = torch.tensor([request.sample for request in requests], device=device)
    return row_keys(sampling.seed, sampling.step, rows, samples)


def _from_last_stage(choice: Choice | None, num_rows: int, model: Model) -> Choice:
    """The last stage's choice on every stage. Collective over the pipeline group; float64 holds any token id."""
    numbers = torch.empty(3, num_rows, dtype=torch.float64, device=next(model.chunks[0].parameters()).device)
    if choice is not None:
        numbers.copy_(torch.stack([choice.tokens.double(), choice.logps.double(), choice.near_ties.double()]))
    group = model.groups.pp
    dist.broadcast(numbers, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return Choice(numbers[0].long(), numbers[1].float(), numbers[2].bool())
