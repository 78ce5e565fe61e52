"""Ranks that would not run the same program are told before they start."""

from megarlhf.device.versions import code_digest, versions
from megarlhf.loop.agreement import disagreements, merged_violations


def test_the_odd_rank_out_is_named():
    same = {"settings": "aa", "torch": "2.13"}
    assert disagreements([("one", same), ("two", same)]) == []
    (sentence,) = disagreements([("one", same), ("two", same), ("two", same | {"settings": "bb"})])
    assert sentence.startswith("settings: most ranks have aa, but rank 2 on two has bb; give all ranks the same file")
    (sentence,) = disagreements([("one", same), ("one", same), ("three", same | {"torch": "2.12"})])
    assert "torch: most ranks have 2.13, but rank 2 on three has 2.12; install the same everywhere" in sentence


def test_what_one_rank_finds_wrong_is_told_with_its_rank():
    found = merged_violations([("one", ["a: wrong"]), ("two", ["a: wrong", "b: not there"]), ("two", ["a: wrong"])])
    assert found == ["a: wrong", "rank 1 on two: b: not there"]


def test_versions_name_what_a_run_computes_with():
    found = versions()
    assert found["torch"].startswith("2.") and found["megatron-core"].startswith("0.")
    assert found["code"] == code_digest() and len(found["code"]) == 16
