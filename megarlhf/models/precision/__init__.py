"""Everything about eight-bit floating point: how numbers are quantised, linears that compute with them, what they keep.

Nothing outside this folder names FP8 but the settings that choose it.
"""

BLOCK = 128
"""Side of a block of the blockwise recipe."""
MX_BLOCK = 32
"""Neighbours that share a scale in MXFP8 (OCP Microscaling Formats 1.0, section 5.2)."""
