"""Data sets that are learnt from as they are written: rows of a file become prompts and answers in token ids.

Three kinds of row: demonstrations (a conversation, a prompt with its response, or a plain text), preferences (chosen
and rejected, or several ranked responses), and answers with a grade (a score, or a label). Prompts and responses are
texts or lists of turns. What is dropped is counted and logged.
"""

from megarlhf.config.corpus import Corpus
from megarlhf.data.examples import Example
from megarlhf.data.tokenizer import Tokenizer


def read_demonstrations(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"messages": [...]}`, `{"prompt", "response"}` or `{"text"}`, in file order; one answer each.

    `section` is the name of `settings` in error messages. Raises DataError for rows that cannot be used, and when no
    example is left.
    """
    raise NotImplementedError


def read_preferences(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "chosen", "rejected", "margin"?}` or `{"prompt", "responses", "ranks"}` (1 is best)."""
    raise NotImplementedError


def read_scored(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "response", "score"}`: one answer each, with `score`."""
    raise NotImplementedError


def read_labelled(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "response", "label"}` (KTO): one answer each, with `preference` 1 (desirable) or 0."""
    raise NotImplementedError
