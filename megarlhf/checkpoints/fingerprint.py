"""A short text that says which model a folder holds: config, tokenizer and a sample of the weights, not its place."""

from hashlib import blake2b
from pathlib import Path

_READ_WHOLE = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json")
_SAMPLE_BYTES = 2**16


def folder_fingerprint(folder: str | Path) -> str:
    """The same for a copy of the folder, another for another model of the same sizes. Raises OSError.

    Weights are sampled: of every safetensors file its length, its first and its last 64 KiB.
    """
    digest = blake2b(digest_size=16)
    for path in sorted(Path(folder).iterdir()):
        if path.name in _READ_WHOLE:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        elif path.suffix == ".safetensors":
            size = path.stat().st_size
            with path.open("rb") as stream:
                first = stream.read(_SAMPLE_BYTES)
                stream.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(f"{path.name}\0{size}".encode() + first + stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
