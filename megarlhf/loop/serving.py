"""A model that answers questions: bodies of requests are checked and become rows, rows become scores or log-probs.

Checking happens wherever the request arrived; answering is collective, so every rank of the model gets the question.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.data.encoding import Encoder
from megarlhf.data.files import check_text
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.scorer import LogprobScorer, RewardModelScorer
from megarlhf.errors import DataError
from megarlhf.models.build import Model
from megarlhf.models.score_config import ScoreRule, label_names
from megarlhf.records.experience import Experience
from megarlhf.rewards.remote import is_finite_number
from megarlhf.rewards.server import Refusal

ServedRole = Literal["reward", "reference"]
PATHS: dict[ServedRole, str] = {"reward": "/score", "reference": "/logprobs"}


@dataclass(frozen=True)
class Question:
    """A request that was found answerable."""

    rows: Experience
    temperature: float


@dataclass(frozen=True)
class Served:
    """A reward model or reference with its tokenizer."""

    role: ServedRole
    model: Model
    tokenizer: Tokenizer
    max_tokens: int
    """Tokens packed into one micro-batch."""
    max_rows: int
    """Rows of one request."""
    rule: ScoreRule = ScoreRule()
    """How a reward model's labels become one score."""

    @property
    def path(self) -> str:
        """Where it is asked."""
        return PATHS[self.role]

    def health(self) -> dict[str, Any]:
        """Who this is."""
        architecture = self.model.architecture
        return {
            "role": self.role,
            "path": self.path,
            "model": self.tokenizer.folder.absolute().name,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": architecture.vocab_size,
            "max_positions": architecture.max_positions,
            **(self._reward_health() if self.role == "reward" else {}),
        }

    def _reward_health(self) -> dict[str, Any]:
        labels, rule = label_names(self.model.architecture), self.rule
        return {"labels": labels, "weights": rule.weights, "is_normalised": rule.statistics is not None}

    def question(self, body: dict[str, Any]) -> Question:
        """The body's rows: its `prompt_ids` and `response_ids`, or, for scores, its `prompts` and `responses`.

        Ids of another tokenizer (`tokenizer` is a fingerprint) are passed over for the texts. Raises Refusal.
        """
        own_ids = body.get("tokenizer", self.tokenizer.fingerprint) == self.tokenizer.fingerprint
        if "prompt_ids" in body and own_ids:
            prompts, responses = _ids(body, "prompt_ids"), _ids(body, "response_ids")
        elif self.role == "reward" and "prompts" in body:
            prompts, responses = self._encoded(body)
        elif "prompt_ids" in body:
            raise Refusal(400, "tokenizer: the ids are of another tokenizer than this model's; send texts, if to score")
        else:
            texts = ", or prompts and responses" if self.role == "reward" else ""
            raise Refusal(400, f"send prompt_ids and response_ids{texts}; the keys sent are {sorted(body)}")
        if len(prompts) != len(responses):
            raise Refusal(400, f"{len(prompts)} prompts and {len(responses)} responses; send as many of each")
        if len(prompts) > self.max_rows:
            raise Refusal(413, f"{len(prompts)} rows are more than the {self.max_rows} that this server takes at once")
        self._check(prompts, responses)
        return Question(_rows(prompts, responses), self._temperature(body))

    def answer(self, question: Question) -> dict[str, list]:
        """{"scores": [B], "raw_scores": [B][labels]} or {"logprobs": [B][tokens of the response]}.

        Scores are normalised and combined by the rule, raw ones are what the head said. Collective over the world.
        """
        rows = question.rows
        if not rows.num_rows:
            return {"scores": [], "raw_scores": []} if self.role == "reward" else {"logprobs": []}
        if self.role == "reward":
            raw = RewardModelScorer(self.model, self.max_tokens).raw_scores(rows)
            return {"scores": self.rule.combined(raw).tolist(), "raw_scores": raw.tolist()}
        scored = LogprobScorer(self.model, "logp_reference", question.temperature, self.max_tokens).annotate(rows)
        assert scored.logp_reference is not None
        pairs = zip(scored.logp_reference, rows.mask, strict=True)
        return {"logprobs": [logp[mask].tolist() for logp, mask in pairs]}

    def _temperature(self, body: dict[str, Any]) -> float:
        value = body.get("temperature", 1.0)
        if not is_finite_number(value) or value <= 0:
            raise Refusal(400, f"temperature: {value!r}; send a number above 0")
        return float(value)

    def _encoded(self, body: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of texts, as `megarlhf rm` reads them; a response whose entry in `finished` is true gets an end token."""
        prompts, responses = _list(body, "prompts"), _list(body, "responses")
        finished = _list(body, "finished") if "finished" in body else [False] * len(responses)
        for key, other in (("finished", finished), ("prompts", prompts)):
            if len(other) != len(responses):
                raise Refusal(400, f"{key}: {len(other)} entries for {len(responses)} responses")
        rows = enumerate(zip(prompts, responses, finished, strict=True))
        encoded = [self._row(row, prompt, text, is_finished is True) for row, (prompt, text, is_finished) in rows]
        return [prompt for prompt, _ in encoded], [response for _, response in encoded]

    def _row(self, row: int, prompt: Any, text: Any, is_finished: bool) -> tuple[list[int], list[int]]:
        """Ids of a prompt and its response."""
        if not isinstance(text, str):
            raise Refusal(400, f"responses[{row}]: a {type(text).__name__}; send a text")
        if not isinstance(prompt, str | list):
            raise Refusal(400, f"prompts[{row}]: a {type(prompt).__name__}; send a text or a list of messages")
        with _refusing(f"prompts[{row}]"):
            check_text("it", prompt)
            head = self.tokenizer.encode_prompt(prompt)
        if not head:
            raise Refusal(400, f"row {row}: the prompt has no token")
        with _refusing(f"responses[{row}]"):
            check_text("it", text)
            answer = self._answer(prompt, head, text, is_finished)
        begin = self.tokenizer.bos_id
        # A rendered chat spells its own beginning-of-sequence token, which the tokenizer then puts before it again.
        return (head[1:] if begin is not None and head[:2] == [begin, begin] else head), answer

    def _answer(self, prompt: str | list, head: list[int], text: str, is_finished: bool) -> list[int]:
        """Ids of the response `text` behind the prompt's ids `head`. A chat's template writes whole turns only."""
        if isinstance(prompt, list) and not is_finished:
            return self.tokenizer.encode_plain(text)
        encoder = Encoder(self.tokenizer, append_eos=is_finished and self.tokenizer.eos_id is not None)
        return list(encoder.answer(prompt, tuple(head), text).token_ids)

    def _check(self, prompts: list[list[int]], responses: list[list[int]]) -> None:
        vocabulary, longest = self.model.architecture.vocab_size, self.model.architecture.max_positions
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if not prompt:
                raise Refusal(400, f"row {row}: the prompt has no token")
            if len(prompt) + len(response) > longest:
                raise Refusal(400, f"row {row}: {len(prompt) + len(response)} tokens; the model reads {longest}")
            if max(*prompt, *response, 0) >= vocabulary:
                raise Refusal(400, f"row {row}: id {max(prompt + response)}; the model's ids end at {vocabulary - 1}")


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Inside the block a DataError is the sender's fault."""
    try:
        yield
    except DataError as error:
        raise Refusal(400, f"{where}: {error}") from error


def _rows(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> Experience:
    count = len(prompts)
    return Experience.from_completions(
        prompts, responses, None, row_id=range(count), group=range(count), finished=[True] * count
    )


def _list(body: dict[str, Any], key: str) -> list:
    value = body.get(key)
    if not isinstance(value, list):
        raise Refusal(400, f"{key}: a {type(value).__name__}; send a list with one entry per response")
    return value


def _ids(body: dict[str, Any], key: str) -> list[list[int]]:
    rows = _list(body, key)
    for number, row in enumerate(rows):
        if not isinstance(row, list) or not all(type(token) is int and token >= 0 for token in row):
            raise Refusal(400, f"{key}[{number}]: send a list of token ids, whole numbers of 0 or more")
    return rows
