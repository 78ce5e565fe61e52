"""Tests beside Transformer Engine's own Python, on reference kernels: `make test-te`, a process of their own.

Importing this package makes the process one with Transformer Engine; it is therefore never imported by `make test`.
"""

import pytest

from tests.transformer_engine_cpu import stand_in

if not stand_in.is_unpacked():
    pytest.skip(f"no unpacked {stand_in.NAME} wheel in .te; `make te-reference` fetches it", allow_module_level=True)
stand_in.activate()
