"""A megatron-core distributed checkpoint (torch_dist) becomes a Hugging Face folder: safetensors, index, config.json.

python -m checkpoints_tools.megatron_to_hf SRC DST --workers 2
"""

import sys
from collections.abc import Sequence

from checkpoints_tools import command


def main(words: Sequence[str] | None = None) -> int:
    """Convert, and say where it is."""
    parser = command.parser("megatron-to-hf", __doc__)
    command.add_conversion(parser)
    size = "bytes of a safetensors file (5 GiB by default)"
    parser.add_argument("--max-shard-bytes", type=command.positive, default=5 * 2**30, help=size)
    given = parser.parse_args(words)
    workers = command.start_workers(given)
    from megarlhf.telemetry.progress import ByteProgress
    from megarlhf.weights.convert import write_hugging_face

    write_hugging_face(
        given.source,
        given.target,
        config=given.config,
        workers=workers,
        without_tokenizer=given.without_tokenizer,
        dtype=command.dtype_of(given.dtype),
        max_shard_bytes=given.max_shard_bytes,
        progress=ByteProgress(sys.stderr),
    )
    print(f"{given.target}: a Hugging Face folder")
    return command.DONE


if __name__ == "__main__":
    command.run(main)
