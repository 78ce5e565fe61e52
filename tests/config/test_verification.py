"""What `verify-layout` takes as a layout, and which cases it makes of its flags."""

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.verification import Case, Verification, cases, parse_layout

PRINTED = [
    Layout(tp=2, pp=3, sp=True),
    Layout(pp=2, vp=2),
    Layout(cp=4),
    Layout(pp=3, first_stage_layers=1, last_stage_layers=2),
]


@pytest.mark.parametrize(
    "word,layout,num_ranks",
    [
        ("tp2", Layout(tp=2), 2),
        ("tp2+sp", Layout(tp=2, sp=True), 2),
        ("pp2+vp2", Layout(pp=2, vp=2), 2),
        ("dp3", Layout(), 3),
        ("tp2+pp2+sp+dp2", Layout(tp=2, pp=2, sp=True), 8),
        ("cp2+dp2", Layout(cp=2), 4),
        ("pp2+first1", Layout(pp=2, first_stage_layers=1), 2),
    ],
)
def test_sizes_joined_by_plus_are_a_layout(word, layout, num_ranks):
    assert parse_layout(word) == (layout, num_ranks)


@pytest.mark.parametrize("layout", PRINTED)
def test_a_layout_is_read_as_it_is_printed(layout):
    assert parse_layout(str(layout)) == (layout, layout.model_ranks)


@pytest.mark.parametrize("word", ["", "tp", "tp0", "2tp", "tp2+", "tp2+zz3", "dp0", "pp2+first0"])
def test_what_is_no_layout_is_refused(word):
    assert parse_layout(word) is None


def test_every_layout_meets_every_micro_batch_size_fewest_ranks_first():
    found, violations = cases(Verification(layouts="pp2, tp2", micro_batch_tokens="64,8"), {}, 4096)
    assert not violations
    assert found == [
        Case("one process", Layout(), 1, 64),
        Case("one process", Layout(), 1, 8),
        Case("pp2", Layout(pp=2), 2, 64),
        Case("pp2", Layout(pp=2), 2, 8),
        Case("tp2", Layout(tp=2), 2, 64),
        Case("tp2", Layout(tp=2), 2, 8),
    ]


def test_without_flags_the_recipes_own_layouts_are_tried():
    found, _ = cases(Verification(), {"actor.train": Layout(tp=2), "critic.train": Layout(tp=2)}, 128)
    assert [(case.layout, case.num_ranks, case.micro_batch_tokens) for case in found] == [
        (Layout(), 1, 128),
        (Layout(tp=2), 2, 128),
        (Layout(), 2, 128),
    ]


def test_every_wrong_flag_is_told():
    options = Verification(layouts="tp2,three", micro_batch_tokens="64,-1", prompts=0, loss_tolerance=-1.0)
    _, violations = cases(options, {}, 4096)
    assert len(violations) == 4
    for words in ("'three' is no layout", "'-1' is not a whole number", "--prompts: 0", "--loss_tolerance: -1.0"):
        assert any(words in violation for violation in violations)
