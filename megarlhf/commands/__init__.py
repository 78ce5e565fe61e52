"""The commands: one module each, with SUMMARY (one line, a plain string) and main(argv) -> exit code.

A module is imported only when its command runs; `cli.py` reads SUMMARY from the source.
"""
