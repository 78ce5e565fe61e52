"""What a person who waits is told."""

import io

from megarlhf.telemetry.progress import CountProgress


def test_counts_are_told_now_and_then():
    out = io.StringIO()
    progress = CountProgress("responses", out, every_s=0)
    progress(3, 8)
    patient = CountProgress("responses", out, every_s=60)
    patient(4, 8)
    CountProgress("responses", None, every_s=0)(5, 8)
    assert out.getvalue() == "3 of 8 responses, 0 s\n"
