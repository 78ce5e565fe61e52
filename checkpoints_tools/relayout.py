"""A megatron-core distributed checkpoint is laid out anew, in blocks and files for another number of ranks.

python -m checkpoints_tools.relayout SRC DST --tp 4 --pp 2 --workers 2
"""

from collections.abc import Sequence

from checkpoints_tools import command, hf_to_megatron


def main(words: Sequence[str] | None = None) -> int:
    """Lay out, and say where it is: the same work, since a source is read alike in either format."""
    return hf_to_megatron.main(words, "relayout", __doc__)


if __name__ == "__main__":
    command.run(main)
