"""What a checkpoint holds: every tensor with its type, shape and blocks, and whether its config.json fits.

python -m checkpoints_tools.inspect FOLDER [--json]
"""

import json
from collections.abc import Sequence

from checkpoints_tools import command


def main(words: Sequence[str] | None = None) -> int:
    """Print the report; 0 when the checkpoint is whole, 1 when its config.json asks for something else."""
    parser = command.parser("inspect", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="Hugging Face folder or torch_dist checkpoint")
    command.add_config(parser)
    parser.add_argument("--fingerprint", action="store_true", help="hash every tensor (reads everything)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args(words)
    from megarlhf.weights.report import inspect_folder

    report = inspect_folder(given.folder, given.config, with_fingerprint=given.fingerprint)
    if given.json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        print(*report.lines(), sep="\n")
    return command.FAILED if report.problem else command.DONE


if __name__ == "__main__":
    command.run(main)
