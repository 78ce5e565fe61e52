"""Whether two models are the same: names, shapes, types and every bit, each side in either format.

python -m checkpoints_tools.compare A B [--json]
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from checkpoints_tools import command


def main(words: Sequence[str] | None = None) -> int:
    """Print the differences; 0 when there is none, 1 when there is one."""
    parser = command.parser(__doc__)
    parser.add_argument("first", metavar="A", help="Hugging Face folder or torch_dist checkpoint")
    parser.add_argument("second", metavar="B", help="the same")
    command.add_config(parser, "--config-a")
    command.add_config(parser, "--config-b")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(words)
    from megarlhf.weights.report import compare
    from megarlhf.weights.source import open_source

    first, second = open_source(given.first, given.config_a), open_source(given.second, given.config_b)
    found = compare(first, second)
    if given.json:
        print(json.dumps({"num_tensors": len(first.shapes), "differences": [asdict(one) for one in found]}, indent=1))
    else:
        lines = [f"{one.name:60} {one.kind:8} {one.first} | {one.second}" for one in found]
        print(*lines, f"{len(first.shapes)} tensors in A, {len(second.shapes)} in B, {len(found)} differ", sep="\n")
    return command.FAILED if found else command.DONE


if __name__ == "__main__":
    command.run(main)
