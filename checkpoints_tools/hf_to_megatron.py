"""A Hugging Face folder becomes a megatron-core distributed checkpoint (torch_dist), tokenizer and config beside it.

python -m checkpoints_tools.hf_to_megatron SRC DST --tp 4 --pp 2 --workers 2
"""

import sys
from collections.abc import Sequence

from checkpoints_tools import command


def main(words: Sequence[str] | None = None, tool: str = "hf-to-megatron", description: str = __doc__) -> int:
    """Convert, and say where it is."""
    parser = command.parser(tool, description)
    command.add_conversion(parser)
    command.add_layout(parser)
    given = parser.parse_args(words)
    layout = command.layout(given)
    workers = command.start_workers(given)
    from megarlhf.telemetry.progress import ByteProgress
    from megarlhf.weights.convert import write_megatron

    write_megatron(
        given.source,
        given.target,
        layout,
        config=given.config,
        workers=workers,
        without_tokenizer=given.without_tokenizer,
        dtype=command.dtype_of(given.dtype),
        progress=ByteProgress(sys.stderr),
    )
    sizes = f"tp {given.tp}, pp {given.pp}" + (f", vp {given.vp}" if given.vp > 1 else "")
    print(f"{given.target}: a torch_dist checkpoint, in blocks for {sizes} (any layout loads it)")
    return command.DONE


if __name__ == "__main__":
    command.run(main)
