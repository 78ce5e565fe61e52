"""Where a response's score may come from besides a reward model: functions here, and servers elsewhere.

A source has a name (its metric is reward/NAME) and turns rows into one number each, or raises RewardError.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from megarlhf.config.settings import Reward
from megarlhf.errors import RemoteError, RewardError
from megarlhf.records.experience import Experience
from megarlhf.rewards.functions import RewardFunction, call_reward, checked_scores, resolve
from megarlhf.rewards.remote import Endpoint, check_url, is_url, numbers, read_token


class Source(Protocol):
    """Scores rows of texts; not collective."""

    @property
    def name(self) -> str: ...

    def scores(self, rows: Experience) -> torch.Tensor:
        """[B] float32. Raises RewardError."""
        ...


@dataclass(frozen=True)
class FunctionSource:
    """A function of this process, called again `retries` times when it fails."""

    name: str
    function: RewardFunction
    timeout_s: float
    retries: int

    def scores(self, rows: Experience) -> torch.Tensor:
        """[B] float32. Raises RewardError with what the last try raised."""
        for left in reversed(range(self.retries + 1)):
            try:
                return call_reward(self.function, rows.prompts, rows.responses, rows.metadata, self.timeout_s)
            except RewardError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class RemoteSource:
    """A server that is sent texts, metadata and token ids, `batch_size` responses at a time."""

    name: str
    endpoint: Endpoint
    batch_size: int
    tokenizer: str
    """Fingerprint of the tokenizer that the ids belong to; a server with another one reads the texts."""

    def scores(self, rows: Experience) -> torch.Tensor:
        """[B] float32. Raises RewardError naming the samples of the request that failed."""
        parts = [torch.zeros(0)]
        for start in range(0, rows.num_rows, self.batch_size):
            part = rows.select(range(start, min(rows.num_rows, start + self.batch_size)))
            ids = [row.get("id", number) for number, row in enumerate(part.metadata)]
            try:
                answer = self.endpoint.post(request_body(part, self.tokenizer))
                values = numbers(answer, "scores", part.num_rows, self.endpoint.url)
            except RemoteError as error:
                raise RewardError(f"reward server {error} (samples {', '.join(map(repr, ids[:8]))})") from error
            parts.append(checked_scores(self.endpoint.url, ids, values))
        return torch.cat(parts)


def request_body(rows: Experience, tokenizer: str) -> dict[str, Any]:
    """What is asked about: texts, metadata, and the ids as they were sampled, with their tokenizer's fingerprint."""
    return {
        "prompts": list(rows.prompts),
        "responses": list(rows.responses),
        "metadata": [dict(row) for row in rows.metadata],
        "finished": rows.finished.tolist(),
        "tokenizer": tokenizer,
        **token_ids(rows),
    }


def token_ids(rows: Experience) -> dict[str, list[list[int]]]:
    """`prompt_ids` and `response_ids` of every row."""
    prompts, responses = [], []
    for tokens, length, start in zip(rows.tokens, rows.lengths.tolist(), rows.prompt_lengths.tolist(), strict=True):
        prompts.append(tokens[:start].tolist())
        responses.append(tokens[start:length].tolist())
    return {"prompt_ids": prompts, "response_ids": responses}


def sources(settings: Reward, tokenizer: str) -> list[Source]:
    """The sources of `reward.functions`, in their order. Raises ConfigError.

    `tokenizer` is the fingerprint of the tokenizer that sampled.
    """
    token = read_token("reward.token_file", settings.token_file)
    found: list[Source] = []
    for spec, name in zip(settings.functions, names(settings.functions), strict=True):
        if is_url(spec):
            url = check_url("reward.functions", spec)
            endpoint = Endpoint(url, settings.timeout_s, settings.retries, token)
            found.append(RemoteSource(name, endpoint, settings.request_rows, tokenizer))
        else:
            found.append(FunctionSource(name, resolve(spec), settings.timeout_s, settings.retries))
    return found


def check_spec(spec: str) -> None:
    """Raises ConfigError when `spec` is neither a reward function that can be found nor the address of a server."""
    if is_url(spec):
        check_url("reward.functions", spec)
    else:
        resolve(spec)


def names(specs: Sequence[str]) -> list[str]:
    """A short name for each spec: a function's own, a server's host and path; a second one of a name gets _2."""
    result: list[str] = []
    seen: Counter[str] = Counter()
    for spec in specs:
        if is_url(spec):
            parts = urlsplit(spec)
            short = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
        else:
            short = spec.partition("(")[0].rpartition(":")[2]
        seen[short] += 1
        result.append(short if seen[short] == 1 else f"{short}_{seen[short]}")
    return result
