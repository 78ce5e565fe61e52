"""What is wrong with the settings of a data set is said before the file is opened."""

import pytest

from megarlhf.config.corpus import Corpus, Negatives, corpus_violations, negatives_violations


def test_the_defaults_lack_a_path_only():
    assert list(corpus_violations(Corpus(), "data")) == ["data.path: is not set; give a path"]
    assert not list(corpus_violations(Corpus(path="x"), "data")) and not list(negatives_violations(Negatives(), "n"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (Corpus(path="x", batch_size=0), "data.batch_size: 0 is out of range; choose 1 or more"),
        (Corpus(path="x", epochs=-1), "data.epochs: -1 is out of range; choose 1 or more"),
        (Corpus(path="x", max_tokens=1), "data.max_tokens: 1 is out of range; choose 2 or more"),
    ],
)
def test_a_corpus_out_of_range(settings, complaint):
    assert list(corpus_violations(settings, "data")) == [complaint]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (Negatives(share=1.5), "negatives.share: 1.5 is out of range"),
        (Negatives(share=0.1, kinds=()), "negatives.kinds: is empty"),
        (Negatives(kinds=("shuffeled",)), "negatives.kinds: 'shuffeled' is unknown; accepted: shuffled, truncated"),
    ],
)
def test_spoilt_answers_out_of_range(settings, complaint):
    (found,) = negatives_violations(settings, "negatives")
    assert found.startswith(complaint)
