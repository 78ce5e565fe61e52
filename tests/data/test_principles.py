"""Principles are lines of a file; which of them are drawn depends on the seed and the key alone."""

import pytest

from megarlhf.data.principles import CONSTITUTION, draw_principles, read_principles
from megarlhf.errors import DataError


def test_a_principle_is_a_line_that_is_neither_blank_nor_a_remark(tmp_path):
    path = tmp_path / "principles.txt"
    path.write_bytes(b"\xef\xbb\xbfBe kind.\r\n\n  # a remark\n  Be brief.  ")
    assert read_principles(str(path), "--principles") == ("Be kind.", "Be brief.")


def test_the_constitution_is_used_without_a_file():
    lines = [line for line in CONSTITUTION.read_text().splitlines() if not line.startswith("#")]
    assert list(read_principles("", "--principles")) == lines and len(set(lines)) == len(lines) > 4


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), (b"\xff", "not UTF-8"), (b"# only a remark\n", "holds no principle")]
)
def test_a_file_without_principles_is_refused(tmp_path, content, words):
    path = tmp_path / "principles.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"--principles: .*principles.txt.*{words}"):
        read_principles(str(path), "--principles")


def test_draws_differ_by_key_and_seed_and_repeat():
    principles = [f"p{number}" for number in range(8)]
    draws = [draw_principles(principles, 3, seed, row) for seed in (0, 1) for row in range(20)]
    assert all(len(set(draw)) == 3 for draw in draws)
    assert len(set(draws)) > 30
    assert draws[:20] == [draw_principles(principles, 3, 0, row) for row in range(20)]
    first = [draw_principles(principles, 1, 0, row)[0] for row in range(800)]
    assert all(60 < first.count(principle) < 140 for principle in principles)
