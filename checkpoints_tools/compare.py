"""Whether two models are the same: names, shapes, types and every bit, each side in either format; on texts, logits.

python -m checkpoints_tools.compare A B [--text "A text."] [--json]
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from checkpoints_tools import command


def main(words: Sequence[str] | None = None) -> int:
    """Print the differences; 0 when there is none, 1 when there is one."""
    parser = command.parser("compare", __doc__)
    parser.add_argument("first", metavar="A", help="Hugging Face folder or torch_dist checkpoint")
    parser.add_argument("second", metavar="B", help="the same")
    command.add_config(parser, "--config-a")
    command.add_config(parser, "--config-b")
    parser.add_argument("--text", action="append", default=[], help="compare float32 logits on this; may be repeated")
    parser.add_argument("--tokens", type=_ids, action="append", default=[], help='the same by ids, as in "5 17 3"')
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(words)
    from megarlhf.weights.report import compare
    from megarlhf.weights.source import open_source

    first, second = open_source(given.first, given.config_a), open_source(given.second, given.config_b)
    rows = [*_tokenized(given.text, first, second), *given.tokens]
    found = compare(first, second)
    answers, tolerance = _logits(first, second, rows) if rows else ([], 0.0)
    apart = [answer for answer in answers if answer.relative > tolerance]
    if given.json:
        texts = [asdict(answer) | {"relative": answer.relative} for answer in answers]
        content = {"num_tensors": len(first.shapes), "differences": [asdict(one) for one in found], "texts": texts}
        print(json.dumps(content, indent=1))
    else:
        lines = [f"{one.name:60} {one.kind:8} {one.first} | {one.second}" for one in found]
        print(*lines, f"{len(first.shapes)} tensors in A, {len(second.shapes)} in B, {len(found)} differ", sep="\n")
        _print_answers(answers, tolerance)
    return command.FAILED if found or apart else command.DONE


def _ids(text: str) -> list[int]:
    ids = [int(word) for word in text.replace(",", " ").split()]
    if not ids:
        raise argparse.ArgumentTypeError("expected token ids")
    return ids


def _tokenized(texts: list[str], *sources) -> list[list[int]]:
    """Ids of the texts, by the first tokenizer that lies beside a model."""
    if not texts:
        return []
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.errors import CheckpointError
    from megarlhf.weights.hf_config import has_tokenizer

    folders = [source.config_folder for source in sources if has_tokenizer(source.config_folder)]
    if not folders:
        raise CheckpointError(
            f"--text: neither {sources[0].config_folder} nor {sources[1].config_folder} has a tokenizer; copy one "
            'there, or give token ids: --tokens "5 17 3"'
        )
    tokenizer = Tokenizer(folders[0])
    rows = [tokenizer.encode_plain(text) for text in texts]
    if not all(rows):
        raise CheckpointError("--text: a text without a token; give a longer one")
    return rows


def _logits(first, second, rows: list[list[int]]):
    """The answers, and what is rounding. megatron-core can be imported only once the device is prepared."""
    from megarlhf import device

    device.prepare()
    from megarlhf.weights.logits import TOLERANCE, compare_logits

    device.join_world()
    return compare_logits(first, second, rows), TOLERANCE


def _print_answers(answers: list, tolerance: float) -> None:
    for number, answer in enumerate(answers, start=1):
        verdict = "alike" if answer.relative <= tolerance else f"APART (more than {tolerance:g} of the largest logit)"
        print(
            f"text {number}: {answer.num_tokens} tokens, logits differ by up to {answer.largest:.3g} "
            f"({answer.relative:.2g} of the largest), same choice at {answer.same_choice:.1%}: {verdict}"
        )


if __name__ == "__main__":
    command.run(main)
