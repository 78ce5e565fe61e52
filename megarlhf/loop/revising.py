"""Constitutional critique and revision (Bai et al. 2022, section 3.1): an answer, what a principle finds wrong with it,
a better answer; and so on, round by round, each under a principle of its own.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarlhf.config.answers import Answers
from megarlhf.data.principles import draw_principles
from megarlhf.data.questions import critique_request, prompt_as_written, revision_request
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Completion, Generator, Request
from megarlhf.loop.inference import requests_for, sampling
from megarlhf.records.prompts import Prompt


@dataclass(frozen=True)
class Draft:
    """An answer on its way. After a round it has one more critique and one more revision."""

    prompt: Prompt
    sample: int
    answer: str
    """As it was sampled from the prompt."""
    principles: tuple[str, ...]
    """One for each round."""
    critiques: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    is_cut: bool = False
    """The last revision was cut at max_new_tokens."""

    @property
    def text(self) -> str:
        """The answer as it is now."""
        return self.revisions[-1] if self.revisions else self.answer

    def row(self) -> dict[str, object]:
        """The row of a file of demonstrations, with how it came about."""
        steps = zip(self.principles, self.critiques, self.revisions, strict=True)
        return {
            "id": self.prompt.metadata["id"],
            "sample": self.sample,
            "prompt": prompt_as_written(self.prompt),
            "response": self.text,
            "answer": self.answer,
            "steps": [{"principle": one, "critique": two, "revision": three} for one, two, three in steps],
        }


@dataclass(frozen=True)
class Writer:
    """The model that answers, criticizes and revises. Its methods are collective over the world."""

    generator: Generator
    tokenizer: Tokenizer
    settings: Answers
    left_out: Counter[str]
    """Counts drafts that are given up, by reason."""

    def drafts(self, prompts: Sequence[Prompt], principles: Sequence[str], rounds: int) -> list[Draft]:
        """`n` answers to each prompt, with their draws of principles."""
        num_samples, seed = self.settings.samples_per_prompt, self.settings.seed
        completions = self._sample(requests_for(prompts, num_samples), step=0)
        keys = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
        return [
            Draft(
                prompt,
                sample,
                self.tokenizer.decode(one.token_ids),
                draw_principles(principles, rounds, seed, prompt.row_id, sample),
            )
            for (prompt, sample), one in zip(keys, completions, strict=True)
        ]

    def after_round(self, drafts: Sequence[Draft], number: int) -> list[Draft]:
        """The drafts after round `number` (from 0), without those that are given up."""
        return self._revised(self._criticized(drafts, number), number)

    def _criticized(self, drafts: Sequence[Draft], number: int) -> list[Draft]:
        asked = [critique_request(self.tokenizer, one.prompt, one.text, one.principles[number]) for one in drafts]
        return [
            replace(draft, critiques=(*draft.critiques, self.tokenizer.decode(completion.token_ids).strip()))
            for draft, completion in self._replies(drafts, asked, step=1 + 2 * number)
        ]

    def _revised(self, drafts: Sequence[Draft], number: int) -> list[Draft]:
        asked = [
            revision_request(self.tokenizer, one.prompt, one.text, one.principles[number], one.critiques[number])
            for one in drafts
        ]
        revised = []
        for draft, completion in self._replies(drafts, asked, step=2 + 2 * number):
            text = self.tokenizer.decode(completion.token_ids).strip()
            if not text:
                self.left_out["blank_revisions"] += 1
                continue
            # a text that continues a plain prompt brings the blank between the two along
            blank = draft.answer[: len(draft.answer) - len(draft.answer.lstrip())]
            is_cut = completion.finish_reason == "length"
            revised.append(replace(draft, revisions=(*draft.revisions, blank + text), is_cut=is_cut))
        return revised

    def _replies(
        self, drafts: Sequence[Draft], asked: Sequence[tuple[int, ...]], step: int
    ) -> list[tuple[Draft, Completion]]:
        """Each draft with what follows its question, except where the question leaves no room for a reply."""
        room = self.generator.model.architecture.max_positions - self.settings.max_new_tokens
        fitting = [(draft, ids) for draft, ids in zip(drafts, asked, strict=True) if len(ids) <= room]
        self.left_out["too_long_answers"] += len(drafts) - len(fitting)
        requests = [Request(ids, draft.prompt.row_id, draft.sample) for draft, ids in fitting]
        completions = self._sample(requests, step)
        return [(draft, one) for (draft, _), one in zip(fitting, completions, strict=True)]

    def _sample(self, requests: Sequence[Request], step: int) -> list[Completion]:
        if not requests:
            return []
        return self.generator.generate(requests, sampling(self.settings, self.tokenizer.stop_ids, step))
