"""What is asked of the generator and what it answers: requests, sampling settings, completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarlhf.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """One response to sample. Requests with equal `prompt_ids` share one prefill."""

    prompt_ids: tuple[int, ...]
    row_id: int
    """Dataset row: part of the key of the sampling noise."""
    sample: int = 0
    """Which of the prompt's samples this is: part of the key of the sampling noise."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises ConfigError with every setting that makes no sense."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (top_k and top_p then do nothing)."""
    top_k: int = 0
    """Choose among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Choose among the most likely tokens that hold this much probability (after top_k)."""
    max_new_tokens: int = 64
    """A response is cut here."""
    min_new_tokens: int = 0
    """Stop tokens cannot be chosen before this many tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response; the one that did is part of it."""
    seed: int = 0
    """Seed of the noise."""
    step: int = 0
    """Step of the run: part of the key of the noise."""

    def __post_init__(self) -> None:
        violations = [sentence for is_wrong, sentence in self._rules() if is_wrong]
        if violations:
            raise ConfigError(violations)

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (not 0 <= self.temperature < float("inf"), f"temperature {self.temperature}: use 0 (greedy) or more"),
            (self.top_k < 0, f"top_k {self.top_k}: use 0 (all tokens) or the number of tokens to choose among"),
            (not 0 < self.top_p <= 1, f"top_p {self.top_p}: use a probability above 0, at most 1 (all tokens)"),
            (not 0 <= self.seed < 2**63, f"seed {self.seed}: use 0 or more, below 2^63"),
            (self.max_new_tokens < 1, f"max_new_tokens {self.max_new_tokens}: use 1 or more"),
            (
                not 0 <= self.min_new_tokens <= max(1, self.max_new_tokens),
                f"min_new_tokens {self.min_new_tokens}: use 0 to max_new_tokens ({self.max_new_tokens})",
            ),
        ]

    @property
    def is_greedy(self) -> bool:
        """True when no noise is used."""
        return self.temperature == 0

    @property
    def is_restricted(self) -> bool:
        """True when top_k or top_p leave tokens out."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    token_ids: tuple[int, ...]
    """Sampled tokens; a stop token that ended the response is the last."""
    logps: tuple[float, ...]
    """Log-prob of each under softmax(logits / temperature) over the whole vocabulary, before min_new_tokens, top_k and
    top_p (temperature 0: under softmax(logits))."""
    finish_reason: Literal["stop", "length"]
    near_ties: tuple[int, ...] = ()
    """Positions in `token_ids` where rounding could have chosen another token (see sampler.py)."""


@dataclass(frozen=True, eq=False)
class Completions(Sequence[Completion]):
    """R sampled responses of N tokens together, end to end. One of them is made when it is asked for."""

    token_ids: Tensor
    """[N] int64: sampled tokens; the stop token that ended a response is its last."""
    logps: Tensor
    """[N] float32, as in `Completion`."""
    near_ties: Tensor
    """[N] bool: rounding could have chosen another token."""
    lengths: Tensor
    """[R] int64: at least 1."""
    finished: Tensor
    """[R] bool: the last token is a stop token."""

    @classmethod
    def of(
        cls, token_ids: Tensor, logps: Tensor, near_ties: Tensor, lengths: Tensor, stop_ids: Sequence[int]
    ) -> "Completions":
        """Finished where the last token is one of `stop_ids`."""
        last = token_ids[lengths.cumsum(0) - 1]
        return cls(token_ids, logps, near_ties, lengths, torch.isin(last, torch.tensor(stop_ids, dtype=torch.int64)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        end = int(self.lengths[: range(len(self))[index] + 1].sum())
        place = slice(end - int(self.lengths[index]), end)
        return _completion(self.token_ids[place], self.logps[place], self.near_ties[place], self.finished[index])

    def __iter__(self):
        lengths = self.lengths.tolist()
        parts = (values.split(lengths) for values in (self.token_ids, self.logps, self.near_ties))
        return map(_completion, *parts, self.finished)


def _completion(token_ids: Tensor, logps: Tensor, near_ties: Tensor, finished: Tensor) -> Completion:
    reason = "stop" if bool(finished) else "length"
    return Completion(
        tuple(token_ids.tolist()), tuple(logps.tolist()), reason, tuple(near_ties.nonzero()[:, 0].tolist())
    )
