"""A megatron-core distributed checkpoint (torch_dist) becomes a Hugging Face folder: safetensors, index, config.json.

python -m checkpoints_tools.megatron_to_hf SRC DST --workers 2
"""

from collections.abc import Sequence

from checkpoints_tools import command
from megarlhf.weights.convert import write_hugging_face
from megarlhf.weights.safetensors_file import MAX_SHARD_BYTES


def main(words: Sequence[str] | None = None) -> int:
    """Convert, and say where it is."""
    parser = command.parser(__doc__)
    command.add_conversion(parser)
    parser.add_argument(
        "--max-shard-bytes", type=command.positive, default=MAX_SHARD_BYTES, help="size of a safetensors file"
    )
    given = parser.parse_args(words)
    write_hugging_face(
        given.source,
        given.target,
        config=given.config,
        workers=given.workers,
        dtype=command.DTYPES.get(given.dtype),
        max_shard_bytes=given.max_shard_bytes,
    )
    print(f"{given.target}: a Hugging Face folder")
    return command.DONE


if __name__ == "__main__":
    command.run(main)
