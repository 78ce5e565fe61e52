"""Everything about eight-bit floating point: how numbers are quantised, linears that compute with them, what they keep.

Nothing outside this folder names FP8 but the settings that choose it.
"""
