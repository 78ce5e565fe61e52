"""Package metadata. Tested versions are in constraints.txt; how to install is in the Makefile (torch first, then this).

Never add the PyPI package named `apex` (not NVIDIA's) or a bare `transformer-engine` (an empty package whose import
raises and takes megatron-core with it).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megarlhf/__init__.py").read_text())[1]
README = ROOT / "README.md"

setup(
    name="megarlhf",
    version=VERSION,
    description="RLHF for large language models on megatron-core: the same parallel code on CPUs and GPUs",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megarlhf", "megarlhf.*", "checkpoints_tools", "checkpoints_tools.*"]),
    package_data={
        "megarlhf": ["py.typed"],
        "megarlhf.data": ["constitution.txt"],
        "megarlhf.telemetry.page": ["*.html"],
        "checkpoints_tools": ["py.typed"],
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=4.57,<6",
        "safetensors",
        "sentencepiece",
        "tyro",
        "pyyaml",
        "psutil",
        "rich",
        "tensorboard",
        "numpy",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch,core_cu13]>=2.14"],
        "report": ["matplotlib", "jinja2"],
        "hub": ["huggingface_hub"],
        "wandb": ["wandb"],
        "parquet": ["pyarrow"],
        "datasets": ["datasets"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "types-PyYAML", "einops", "trl", "peft", "matplotlib", "wandb"],
    },
    entry_points={"console_scripts": ["megarlhf=megarlhf.cli:run"]},
)
