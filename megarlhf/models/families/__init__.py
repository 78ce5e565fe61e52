"""One name table per architecture family, found by the `model_type` of config.json. Mistral's names are Llama's."""

from megarlhf.models.families.gemma import GEMMA2, GEMMA3
from megarlhf.models.families.llama import LLAMA
from megarlhf.models.families.mixtures import MIXTRAL, QWEN3_MOE
from megarlhf.models.families.olmo2 import OLMO2
from megarlhf.models.families.phi3 import PHI3
from megarlhf.models.families.qwen2 import QWEN2
from megarlhf.models.families.qwen3 import QWEN3
from megarlhf.models.names import Family

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": LLAMA,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
}
