"""A Hugging Face folder becomes a megatron-core distributed checkpoint (torch_dist), tokenizer and config beside it.

python -m checkpoints_tools.hf_to_megatron SRC DST --tp 4 --pp 2 --workers 2
"""

from collections.abc import Sequence

from checkpoints_tools import command
from megarlhf.weights.convert import write_megatron


def main(words: Sequence[str] | None = None, description: str = __doc__) -> int:
    """Convert, and say where it is."""
    parser = command.parser(description)
    command.add_conversion(parser)
    command.add_layout(parser)
    given = parser.parse_args(words)
    write_megatron(
        given.source,
        given.target,
        command.layout(given),
        config=given.config,
        workers=given.workers,
        dtype=command.DTYPES.get(given.dtype),
    )
    print(f"{given.target}: a torch_dist checkpoint, in blocks for tp {given.tp}, pp {given.pp} (any layout loads it)")
    return command.DONE


if __name__ == "__main__":
    command.run(main)
