"""Samples responses for a list of requests: shares them over data-parallel ranks, flies them, gathers the answers."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megarlhf.engines.generator.flight import Flight
from megarlhf.engines.generator.requests import Completion, Completions, Request, Sampling
from megarlhf.engines.generator.steps import packed_bytes
from megarlhf.errors import DataError, LayoutError
from megarlhf.models.build import Model
from megarlhf.parallel.rows import gather_objects, gather_rows, share

Follow = Callable[[int, int], None]


@dataclass(frozen=True)
class GenerationReport:
    """What the last call of `Generator.generate` did."""

    num_tokens: int
    """Sampled by all ranks that share the requests."""
    num_near_ties: int
    """Of those, where rounding could have chosen another token; another layout may differ after it."""
    num_prefilled_tokens: int
    """Prompt tokens run by this rank: a prompt counts once however many samples it has."""
    num_decode_passes: int
    """Decoding steps of this rank."""
    cache_bytes: int = 0
    """Of this rank's keys and values."""
    packed_bytes: int = 0
    """Of this rank's repacked weights (see steps.py)."""


class Generator:
    """Generates with the weights that `model` holds at the moment of the call; the cache lives during a call only."""

    def __init__(self, model: Model, max_slots: int, *, prefill_tokens: int = 4096, follow: Follow | None = None):
        """`max_slots`: sequences decoded at once per data-parallel rank; `prefill_tokens`: prompt tokens per pass;
        `follow` is called after every pass with how many of this rank's requests are answered, of how many."""
        layout = model.groups.layout
        if layout.sp or layout.vp > 1 or layout.cp > 1:
            raise LayoutError(
                f"layout {layout} cannot generate: a token a step has no sequence to cut; use tp and pp only"
            )
        if layout.tp % layout.ep:
            raise LayoutError(
                f"layout {layout} cannot generate: copies of the model decode on their own, so each must hold all "
                "experts; choose an ep that divides tp"
            )
        assert model.head == "vocabulary" and max_slots > 0 and prefill_tokens > 0, "a language model and some room"
        self.model = model
        self.max_slots = max_slots
        self.prefill_tokens = prefill_tokens
        self._follow = follow
        self.report = GenerationReport(0, 0, 0, 0)

    @property
    def near_ties(self) -> int:
        """Near ties of the last call, over all ranks that share its requests."""
        return self.report.num_near_ties

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """A completion of each request, in their order. Collective over the world.

        Every rank passes the same requests, or those of its shard of a batch. Raises DataError on all ranks for an
        empty prompt, a token id outside the vocabulary, or a prompt that leaves the model's context too short for
        max_new_tokens.
        """
        return list(self.sample(requests, sampling))

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Completions:
        """`generate`, whose answer is flat tensors on the host, however many tokens there are."""
        rows = self.model.groups.rows
        mine = share_requests(requests, sampling.max_new_tokens, rows.size())[rows.rank()]
        own = [requests[i] for i in mine]
        _require_readable(own, sampling, self.model)
        completions, flight = self._fly(own, sampling)
        everything = _gather(mine, completions, len(requests), sampling, self.model)
        self.report = GenerationReport(
            num_tokens=len(everything.token_ids),
            num_near_ties=int(everything.near_ties.sum()),
            num_prefilled_tokens=flight.num_prefilled_tokens if flight else 0,
            num_decode_passes=flight.num_decode_passes if flight else 0,
            cache_bytes=flight.cache_bytes if flight else 0,
            packed_bytes=packed_bytes(self.model, sampling.max_new_tokens) if flight else 0,
        )
        return everything

    def _fly(self, requests: list[Request], sampling: Sampling) -> tuple[Completions, Flight | None]:
        if not requests:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Completions(nothing, torch.zeros(0), nothing.bool(), nothing, nothing.bool()), None
        modes = [chunk.training for chunk in self.model.chunks]
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.inference_mode():
            flight = Flight(self.model, requests, sampling, self.max_slots, self.prefill_tokens)
            completions = flight.run(self._follow)
        for chunk, mode in zip(self.model.chunks, modes, strict=True):
            chunk.train(mode)
        # What linears kept is of inference mode: no part of a graph, should this model be the one that trains.
        self.model.weights_changed()
        return completions, flight


def share_requests(requests: Sequence[Request], max_new_tokens: int, dp: int) -> list[list[int]]:
    """Indexes of the requests of each data-parallel rank, balanced by tokens; the same answer on every rank.

    Samples of one prompt stay together to share its prefill, in parts of at most a quarter of a rank's even share.
    """
    samples: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        samples[request.prompt_ids].append(index)
    size = max(1, len(requests) // (4 * dp))
    parts = [rows[at : at + size] for rows in samples.values() for at in range(0, len(rows), size)]
    costs = [len(requests[part[0]].prompt_ids) + max_new_tokens * len(part) for part in parts]
    return [sorted(index for part in shares for index in parts[part]) for shares in share(costs, dp)]


def _gather(mine: list[int], found: Completions, num_requests: int, sampling: Sampling, model: Model) -> Completions:
    """The completions of all ranks that share the requests, in their order. Collective over `Groups.rows`.

    A token travels as two int32: 2 * id, plus 1 for a near tie, and the bits of its log-prob.
    """
    coded = (2 * found.token_ids + found.near_ties).to(torch.int32)
    pairs = torch.stack([coded, found.logps.view(torch.int32)], 1).flatten()
    pairs, lengths = gather_rows(mine, (2 * found.lengths).tolist(), pairs, num_requests, model.groups.rows)
    coded, logps = (column.contiguous() for column in pairs.view(-1, 2).T)
    ids = (coded >> 1).to(torch.int64)
    return Completions.of(ids, logps.view(torch.float32), coded % 2 == 1, lengths // 2, sampling.stop_ids)


def _require_readable(requests: Sequence[Request], sampling: Sampling, model: Model) -> None:
    """Raises DataError on all ranks where one of its own requests is no prompt for this model. Collective over the
    world: a rank looks at what it prefills only."""
    architecture = model.architecture
    room = architecture.max_positions - sampling.max_new_tokens
    if room < 1:
        raise DataError(
            f"max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in the model's "
            f"{architecture.max_positions} positions; choose {architecture.max_positions - 1} or less"
        )
    found = (_problem(request, room, sampling, model) for request in requests)
    problems = gather_objects(next(filter(None, found), ""), model.groups.world)
    if any(problems):
        raise DataError(next(filter(None, problems)))


def _problem(request: Request, room: int, sampling: Sampling, model: Model) -> str:
    """Why the model cannot be given the request; empty: it can."""
    prompt, vocab_size = request.prompt_ids, model.architecture.vocab_size
    if not 0 < len(prompt) <= room:
        return (
            f"prompt of row {request.row_id}: {len(prompt)} tokens and max_new_tokens {sampling.max_new_tokens} "
            f"do not fit the model's {model.architecture.max_positions} positions; give 1 to {room} tokens"
        )
    lowest, highest = min(prompt), max(prompt)
    if 0 <= lowest <= highest < vocab_size:
        return ""
    return (
        f"prompt of row {request.row_id}: token ids {lowest} to {highest} are not all in the model's vocabulary of "
        f"{vocab_size}; tokenizer and model do not belong together"
    )
