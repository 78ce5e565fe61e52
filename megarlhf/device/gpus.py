"""What GPUs this machine has, in words."""

import torch


def describe_gpus() -> dict[str, str]:
    """CUDA's version, and each GPU with its memory, by name; empty without a GPU. Touches no GPU memory."""
    if not torch.cuda.is_available():
        return {}
    found = {"CUDA": str(torch.version.cuda)}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory, kind = f"{properties.total_memory / 2**30:.0f} GiB", f"sm_{properties.major}{properties.minor}"
        found[f"GPU {index}"] = f"{properties.name}, {memory}, {kind}"
    return found
