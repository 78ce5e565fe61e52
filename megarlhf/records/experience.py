"""The batch of a step: one row per sequence, filled field by field as it passes through the stages.

Rows are padded on the right. Position t of a [B, T] field speaks about the token at t+1: its log-prob, whether the
policy sampled it (`mask`), the value *before* it. Shapes and dtypes are checked whenever a record is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megarlhf.records.texts import DecodedTexts

PAD = 0
"""Token id right of a row's end; it is never read, whatever the tokenizer's own padding id is."""

_DTYPES = {
    "tokens": torch.int64,
    "lengths": torch.int64,
    "prompt_lengths": torch.int64,
    "row_id": torch.int64,
    "group": torch.int64,
    "mask": torch.bool,
    "finished": torch.bool,
}
_PER_TOKEN = (
    "mask",
    "logp_rollout",
    "logp_start",
    "logp_reference",
    "entropy",
    "value",
    "token_reward",
    "advantage",
    "target",
)
_MEANING = frozenset({"tokens", "lengths", "prompt_lengths", "mask"})
_TEXTS = ("prompts", "responses", "metadata")
_FILLED_BY = {
    "logp_rollout": "the generator",
    "logp_start": "the actor's scorer",
    "logp_reference": "the reference's scorer",
    "entropy": "the actor's scorer",
    "value": "the critic's scorer",
    "score": "the reward",
    "reward": "credit",
    "token_reward": "credit",
    "advantage": "credit",
    "target": "credit",
    "preference": "the corpus",
    "margin": "the corpus",
    "attributes": "the corpus",
}


@dataclass(frozen=True)
class Experience:
    """B sequences of at most S tokens on the host. A field is None until its stage has filled it."""

    tokens: Tensor
    """[B, S] int64: prompt, then response, exactly as sampled; 0 right of the end."""
    lengths: Tensor
    """[B] int64: tokens of prompt and response together."""
    prompt_lengths: Tensor
    """[B] int64: at least 1."""
    mask: Tensor
    """[B, T] bool: true where the token at t+1 was sampled by the policy (its stop token included)."""
    row_id: Tensor
    """[B] int64: row of the data set."""
    group: Tensor
    """[B] int64: prompt group within this batch; siblings share it, wherever they are."""
    finished: Tensor
    """[B] bool: the response ended with a stop token."""
    prompts: Sequence[str] = ()
    responses: Sequence[str] = ()
    metadata: tuple[Mapping[str, Any], ...] = ()
    """Texts and grading data of each row, for rewards and logs; all empty when there are none. Responses that were
    sampled are decoded when they are read."""
    logp_rollout: Tensor | None = None
    """[B, T] float32: log-prob of the token at t+1 as the sampler saw it, in nats."""
    logp_start: Tensor | None = None
    """[B, T] float32: the same recomputed in the training layout before the first update."""
    logp_reference: Tensor | None = None
    """[B, T] float32: the same under the reference."""
    entropy: Tensor | None = None
    """[B, T] float32: exact entropy of the starting policy's (tempered) distribution over the token at t+1, in nats."""
    value: Tensor | None = None
    """[B, T] float32: the critic's value before the token at t+1."""
    score: Tensor | None = None
    """[B] float32: as the reward gave it, or the one that an answer was given by hand."""
    attributes: Tensor | None = None
    """[B, K] float32: several scores that an answer was given by hand; NaN where one is missing."""
    preference: Tensor | None = None
    """[B] float32: larger is better within the group: 1 chosen and 0 rejected; minus the rank of K answers; of answers
    judged alone, 1 desirable and 0 not."""
    margin: Tensor | None = None
    """[B] float32: by how much the chosen row should win; 0 on the others."""
    reward: Tensor | None = None
    """[B] float32: the score after clipping and penalties, paid at the last sampled token."""
    token_reward: Tensor | None = None
    """[B, T] float32: KL penalty, and the reward at the last sampled token."""
    advantage: Tensor | None = None
    """[B, T] float32."""
    target: Tensor | None = None
    """[B, T] float32: what the critic's value is drawn to."""

    def __post_init__(self) -> None:
        _check_tensors(self)
        _check_meaning(self)

    @classmethod
    def from_completions(
        cls,
        prompt_ids: Sequence[Sequence[int]],
        response_ids: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float]] | None,
        *,
        row_id: Sequence[int],
        group: Sequence[int],
        finished: Sequence[bool],
        prompts: Sequence[str] = (),
        responses: Sequence[str] = (),
        metadata: Sequence[Mapping[str, Any]] = (),
    ) -> Self:
        """Pad B responses, given as lists, into a record. `logps` holds one number per sampled token, in nats."""
        assert len(prompt_ids) == len(response_ids), f"{len(prompt_ids)} prompts and {len(response_ids)} responses"
        experience = cls.from_flat(
            flat_ids(prompt_ids),
            torch.tensor([len(row) for row in prompt_ids], dtype=torch.int64),
            flat_ids(response_ids),
            torch.tensor([len(row) for row in response_ids], dtype=torch.int64),
            row_id=torch.tensor(list(row_id), dtype=torch.int64),
            group=torch.tensor(list(group), dtype=torch.int64),
            finished=torch.tensor(list(finished), dtype=torch.bool),
        )
        scores = {} if logps is None else {"logp_rollout": scatter_rows(logps, experience.mask)}
        texts = {"prompts": tuple(prompts), "responses": tuple(responses), "metadata": tuple(metadata)}
        return experience.replace(**scores, **texts)

    @classmethod
    def from_flat(
        cls,
        prompt_ids: Tensor,
        prompt_lengths: Tensor,
        response_ids: Tensor,
        response_lengths: Tensor,
        *,
        row_id: Tensor,
        group: Tensor,
        finished: Tensor,
    ) -> Self:
        """Pad B responses into a record: ids (of any integer type) of all prompts end to end, of all responses end to
        end, and how many each row has, [B] int64. No work in Python grows with the tokens, and little with the rows."""
        lengths = prompt_lengths + response_lengths
        width = max([2, *lengths.tolist()])
        is_prompt, is_text = _is_before(prompt_lengths, width), _is_before(lengths, width)
        is_response = is_text & ~is_prompt
        tokens = torch.zeros((len(lengths), width), dtype=torch.int64)
        _put(tokens, is_prompt, _fitting(prompt_ids, prompt_lengths, "prompt ids"))
        _put(tokens, is_response, _fitting(response_ids, response_lengths, "response ids"))
        return cls(
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=prompt_lengths,
            mask=is_response[:, 1:].contiguous(),
            row_id=row_id,
            group=group,
            finished=finished,
        )

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Valid (sampled) tokens of all rows."""
        return int(self.mask.count_nonzero())

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed."""
        assert changes.keys() <= self.__dict__.keys(), (
            f"no such fields: {sorted(changes.keys() - self.__dict__.keys())}"
        )
        # What the mask means is checked token by token, so only where it can have changed.
        return replace(self, **changes) if changes.keys() & _MEANING else self._copy(changes)

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The rows `rows`, in that order, of every field that is filled. The width S stays."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return self._copy({name: _rows_of(value, index) for name, value in self._filled()})

    def _copy(self, changes: Mapping[str, Any]) -> Self:
        """With some fields changed, none of which makes the mask mean something else."""
        copy = object.__new__(type(self))
        copy.__dict__.update({**self.__dict__, **changes})
        _check_tensors(copy)
        return copy

    def require(self, names: Sequence[str]) -> None:
        """Assert that the fields `names` are filled; the message says which stage should have filled them."""
        missing = [name for name in names if name not in dict(self._filled())]
        stages = ", ".join(f"{name} (filled by {_FILLED_BY[name]})" for name in missing)
        assert not missing, f"experience lacks {stages}: that stage has not run"

    def _filled(self) -> list[tuple[str, Any]]:
        pairs = [(item.name, self.__dict__[item.name]) for item in fields(self)]
        return [(name, value) for name, value in pairs if value is not None and not (name in _TEXTS and not value)]


def response_mask(lengths: Tensor, prompt_lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool: t is true when the token at t+1 belongs to the response. An empty response has no true t."""
    return _is_before(lengths - 1, width) & ~_is_before(prompt_lengths - 1, width)


def scatter_flat(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float32 from one number per valid token, row by row end to end; 0 elsewhere. Asserts that the count
    agrees."""
    num_valid = int(mask.count_nonzero())
    assert values.shape == (num_valid,), f"{list(values.shape)} numbers for {num_valid} valid tokens"
    return _put(torch.zeros(mask.shape, dtype=torch.float32), mask, values.to(torch.float32))


def valid_values(values: Tensor, mask: Tensor) -> Tensor:
    """[N]: `values` [B, T] where `mask` [B, T], row by row; both on the host, and no gradient goes through."""
    if values.dtype == torch.bfloat16:  # numpy has no such numbers
        return values.masked_select(mask)
    # its way through a mask takes a fifth of the time of torch's
    return torch.from_numpy(values.detach().numpy()[mask.numpy()])


def valid_counts(mask: Tensor) -> Tensor:
    """[B] int64: true positions of each row of [B, T] on the host, which torch would first copy as int64."""
    return torch.from_numpy(np.count_nonzero(mask.numpy(), axis=1))


def last_valid(mask: Tensor) -> Tensor:
    """[B] int64: index of each row's last true position in mask [B, T]; -1 for a row without one."""
    position = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    return torch.where(mask, position, -1).amax(dim=1).to(torch.int64)


def _put(target: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """`target` with `values` [N] where `mask` is true, in place."""
    target.numpy()[mask.numpy()] = values.numpy()
    return target


def scatter_rows(rows: Sequence[Sequence[float] | Tensor], mask: Tensor) -> Tensor:
    """`scatter_flat` of numbers in one list or tensor per row. Asserts that the counts agree row by row."""
    counts = valid_counts(mask).tolist()
    found = [len(row) for row in rows]
    assert found == counts, f"numbers per row {found} differ from the valid tokens per row {counts}"
    flat = [row if isinstance(row, Tensor) else flat_numbers([row]) for row in rows]
    return scatter_flat(torch.cat([torch.zeros(0), *(row.to(torch.float32) for row in flat)]), mask)


def flat_ids(rows: Iterable[Sequence[int]]) -> Tensor:
    """[N] int64: token ids of all rows, end to end."""
    return _flat(list(rows), np.int64)


def flat_numbers(rows: Iterable[Sequence[float]]) -> Tensor:
    """[N] float32: numbers of all rows, end to end."""
    return _flat(list(rows), np.float64).to(torch.float32)


def _flat(rows: list, dtype: type) -> Tensor:
    # a tenth of the time that torch.tensor needs for a list
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows))))


def _is_before(ends: Tensor, width: int) -> Tensor:
    """[B, width] bool: position < end of the row."""
    return torch.arange(width, dtype=torch.int32) < ends[:, None].to(torch.int32)


def _fitting(ids: Tensor, lengths: Tensor, what: str) -> Tensor:
    num_ids = int(lengths.sum())
    assert ids.shape == (num_ids,), f"{what}: shape {list(ids.shape)} for rows of {num_ids} together"
    return ids


def _rows_of(value: Any, index: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, index)
    return value.select(index) if isinstance(value, DecodedTexts) else tuple(value[row] for row in index.tolist())


def _check_tensors(experience: Experience) -> None:
    assert experience.tokens.dim() == 2, f"tokens: shape {list(experience.tokens.shape)} instead of [B, S]"
    num_rows, width = experience.tokens.shape
    for name, value in experience._filled():
        if name in _TEXTS:
            assert len(value) == num_rows, f"{name}: {len(value)} entries for {num_rows} rows"
            continue
        expected = (num_rows, *value.shape[1:2]) if name == "attributes" else _expected_shape(name, num_rows, width)
        dtype = _DTYPES.get(name, torch.float32)
        assert tuple(value.shape) == expected, f"{name}: shape {list(value.shape)} instead of {list(expected)}"
        assert value.dtype == dtype, f"{name}: {value.dtype} instead of {dtype}"


def _expected_shape(name: str, num_rows: int, width: int) -> tuple[int, ...]:
    if name == "tokens":
        return (num_rows, width)
    return (num_rows, width - 1) if name in _PER_TOKEN else (num_rows,)


def _check_meaning(experience: Experience) -> None:
    lengths, prompt_lengths = experience.lengths, experience.prompt_lengths
    width = experience.tokens.shape[1]
    assert bool((prompt_lengths >= 1).all()), "prompt_lengths: a prompt without a token has no position to start from"
    inside = (prompt_lengths <= lengths) & (lengths <= width)
    rows = (~inside).nonzero()[:, 0].tolist()
    assert not rows, f"lengths: rows {rows} are not within [prompt length, {width}]"
    outside = experience.mask & ~response_mask(lengths, prompt_lengths, width - 1)
    rows = outside.any(dim=1).nonzero()[:, 0].tolist() if outside.any() else []
    assert not rows, f"mask: rows {rows} mark tokens outside their response"
