"""Answers from outside the world: each rank asks about its own run of rows, and all that hold them get the answers.

The reference of a run can be such an outsider: a server that keeps the model, on this machine or another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megarlhf.config.settings import Reference
from megarlhf.errors import ConfigError, RemoteError
from megarlhf.parallel.rows import gather_objects
from megarlhf.parallel.shards import EVERYBODY, RankedShard
from megarlhf.records.experience import Experience, flat_numbers, response_mask, scatter_flat
from megarlhf.rewards.remote import Endpoint, check_url, is_finite_number, numbers, read_token
from megarlhf.rewards.sources import token_ids


def ask_on_all_ranks(
    ask: Callable[[Experience], tuple[torch.Tensor, str]], experience: Experience, shard: RankedShard
) -> tuple[torch.Tensor, list[str]]:
    """What `ask` found for all rows of the shard, end to end, and what went wrong on any rank of the world, by rank.

    Each rank asks about its own run of consecutive rows. `ask` returns values, and why there are none; it must not
    raise: its rank would leave the others waiting. A rank without rows does not ask. Collective over the world.
    """
    rank, num_ranks = dist.get_rank(shard.ranks), dist.get_world_size(shard.ranks)
    size = -(-experience.num_rows // num_ranks)
    rows = range(rank * size, min(experience.num_rows, (rank + 1) * size))
    found, problem = ask(experience.select(rows)) if rows else (torch.zeros(0), "")
    problems = [text for text in gather_objects(problem) if text]
    return torch.cat([torch.zeros(0), *gather_objects(found, shard.ranks)]), problems


@dataclass(frozen=True)
class RemoteReference:
    """Log-probs under a reference that a server keeps (`megarlhf serve MODEL_DIR --role reference`)."""

    endpoint: Endpoint
    """Its /logprobs."""
    temperature: float
    request_rows: int
    tokenizer: str
    """Fingerprint of the tokenizer that the ids belong to."""
    shard: RankedShard = EVERYBODY

    def annotate(self, experience: Experience) -> Experience:
        """Fills `logp_reference` [B, T]. Collective over the world; raises RemoteError on all ranks or on none."""
        found, problems = ask_on_all_ranks(self._ask, experience, self.shard)
        if problems:
            raise RemoteError("\n".join(problems))
        everywhere = response_mask(experience.lengths, experience.prompt_lengths, experience.mask.shape[1])
        logp = scatter_flat(found, everywhere)
        return experience.replace(logp_reference=logp * experience.mask)

    def _ask(self, rows: Experience) -> tuple[torch.Tensor, str]:
        """Log-probs of every response token, row by row end to end, and why there are none."""
        found: list[list[float]] = []
        try:
            for start in range(0, rows.num_rows, self.request_rows):
                found += self._request(rows.select(range(start, min(rows.num_rows, start + self.request_rows))))
        except RemoteError as error:
            return torch.zeros(0), f"reference.url: rank {dist.get_rank()}: {error}"
        return flat_numbers(found), ""

    def _request(self, rows: Experience) -> list[list[float]]:
        body = token_ids(rows)
        answer = self.endpoint.post({**body, "temperature": self.temperature, "tokenizer": self.tokenizer})
        found = numbers(answer, "logprobs", rows.num_rows, self.endpoint.url)
        for logps, ids in zip(found, body["response_ids"], strict=True):
            if not isinstance(logps, list) or len(logps) != len(ids) or not all(map(is_finite_number, logps)):
                raise RemoteError(f"{self.endpoint.url}: a row of logprobs is not one number per response token")
        return found


def remote_reference(
    settings: Reference, tokenizer: str, temperature: float, shard: RankedShard = EVERYBODY
) -> RemoteReference:
    """The server at `reference.url`, which has answered that it is one for this tokenizer. Collective over the world.

    `tokenizer` is the fingerprint of the actor's. Raises ConfigError on every rank.
    """
    token = read_token("reference.token_file", settings.token_file)
    base = check_url("reference.url", settings.url).rstrip("/").removesuffix("/logprobs")
    health = Endpoint(f"{base}/health", settings.timeout_s, settings.retries, token)
    problems = gather_objects(_unfit(health, tokenizer))
    if any(problems):
        raise ConfigError([f"reference.url: rank {rank}: {text}" for rank, text in enumerate(problems) if text])
    endpoint = Endpoint(f"{base}/logprobs", settings.timeout_s, settings.retries, token)
    return RemoteReference(endpoint, temperature, settings.request_rows, tokenizer, shard)


def address_violations(settings: Reference) -> list[str]:
    """What is wrong with a section that gives `reference.url`, before anybody is asked."""
    found = []
    if settings.model:
        found.append(
            f"reference.url: {settings.url} and reference.model {settings.model} are both given; keep the one to use"
        )
    for check in (
        partial(check_url, "reference.url", settings.url),
        partial(read_token, "reference.token_file", settings.token_file),
    ):
        try:
            check()
        except ConfigError as problem:
            found += problem.violations
    return found


def _unfit(health: Endpoint, tokenizer: str) -> str:
    """Why what answers at `health` cannot be the reference; "" when it can."""
    try:
        found = health.get()
    except RemoteError as error:
        return f"{error}; start it with `megarlhf serve MODEL_DIR --role reference`"
    if found.get("role") != "reference":
        return f"{health.url}: its role is {found.get('role')!r}; serve the model with --role reference"
    if found.get("tokenizer") != tokenizer:
        return f"{health.url}: the tokenizer of its model differs from the actor's; use models that share a tokenizer"
    return ""
