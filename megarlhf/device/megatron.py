"""Every difference between megatron-core 0.16.1 and 0.19.2 that this project meets, and the faults mended in both."""

import warnings


def mend() -> None:
    """Quiet what megatron-core says at import and construction that a user of this project cannot act on."""
    # 0.19.2 announces HybridModel as GPTModel's successor each time one is built; both run the same layers.
    warnings.filterwarnings("ignore", message=".*GPTModel.*deprecat.*")
    warnings.filterwarnings("ignore", message=".*[Tt]ransformer.?[Ee]ngine.*")
    warnings.filterwarnings("ignore", message=".*[Aa]pex.*")


def version() -> tuple[int, int]:
    """(major, minor) of the installed megatron-core."""
    from megatron.core import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)
