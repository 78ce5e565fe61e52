"""Choosing a token: distribution, log-probs, top_k and top_p against plain loops, vocabulary shards against none."""

import math

import pytest
import torch

from megarlhf import device
from megarlhf.engines.generator import Sampling
from megarlhf.engines.generator.noise import gumbel, hashed, position_keys, row_keys, spread
from megarlhf.engines.generator.sampler import Choice, Shard, _two_first, choose
from megarlhf.errors import ConfigError
from tests.distributed.pool import run_on_ranks


@pytest.fixture(scope="module")
def world():
    device.join_world()
    return torch.distributed.group.WORLD


def noise_keys(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(num_rows)
    return row_keys(0, 0, rows, torch.zeros_like(rows)), torch.zeros_like(rows)


def chosen(logits: torch.Tensor, sampling: Sampling, group, vocab_size: int | None = None, positions=None) -> Choice:
    keys, first = noise_keys(len(logits))
    shard = Shard(start=0, width=logits.shape[1], vocab_size=vocab_size or logits.shape[1], group=group)
    return choose(logits.clone(), keys, first if positions is None else positions, sampling, shard)


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    expected = (len(tokens) * probs.double())[probs > 0]
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_softmax(world, temperature):
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5])
    choice = chosen(logits.expand(20000, -1), Sampling(temperature=temperature), world)
    probs = (logits / temperature).softmax(-1)
    assert chi_square(choice.tokens, probs) < 4 + 4 * math.sqrt(8)
    torch.testing.assert_close(choice.logps, probs.log()[choice.tokens])


def test_logprob_is_of_the_tempered_distribution(world):
    # logits [2, 0]: the numbers of a hand calculation
    for temperature, logp in ((0.5, -0.018150), (1.0, -0.126928), (2.0, -0.313262), (0.0, -0.126928)):
        choice = chosen(torch.tensor([[2.0, 0.0]]).expand(200, -1), Sampling(temperature=temperature), world)
        assert float(choice.logps[choice.tokens == 0][0]) == pytest.approx(logp, abs=1e-5)


def kept_by_loop(logits: list[float], sampling: Sampling) -> list[int]:
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(math.exp(logits[token] / sampling.temperature) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < sampling.top_p:
            kept.append(token)
        mass += math.exp(logits[token] / sampling.temperature) / total
    return kept


@pytest.mark.parametrize("top_k, top_p", [(3, 1.0), (0, 0.8), (4, 0.7), (100, 0.95), (1, 1.0), (0, 1e-6)])
def test_top_k_and_top_p_sample_the_kept_tokens_and_report_the_full_logprob(world, top_k, top_p):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p)
    choice = chosen(logits.expand(20000, -1), sampling, world)
    kept = kept_by_loop(logits.tolist(), sampling)
    probs = torch.zeros(12)
    probs[kept] = (logits[kept] / 0.8).softmax(-1)
    assert chi_square(choice.tokens, probs) < len(kept) + 4 * math.sqrt(2 * len(kept))
    torch.testing.assert_close(choice.logps, (logits / 0.8).log_softmax(-1)[choice.tokens])


def test_top_p_beyond_the_first_candidates_sorts_the_whole_vocabulary(world):
    logits = torch.zeros(2, 5000)  # uniform: 0.9 of the probability is 4500 tokens
    logits[:, :100] = -30.0
    sampling = Sampling(top_p=0.9)
    tokens = torch.cat([chosen(logits.expand(2, -1), sampling, world).tokens for _ in range(2)])
    assert (tokens >= 100).all()


def test_stop_tokens_are_out_until_min_new_tokens_and_logprobs_do_not_notice(world):
    logits = torch.tensor([[5.0, 1.0, 0.0]]).expand(2000, -1)
    sampling = Sampling(min_new_tokens=2, stop_ids=(0,))
    positions = torch.arange(2000) % 4
    choice = chosen(logits, sampling, world, positions=positions)
    assert not (choice.tokens[positions < 2] == 0).any() and (choice.tokens[positions >= 2] == 0).any()
    torch.testing.assert_close(choice.logps, logits[0].log_softmax(-1)[choice.tokens])
    greedy = chosen(logits, Sampling(temperature=0, min_new_tokens=2, stop_ids=(0,)), world, positions=positions)
    assert greedy.tokens.tolist() == [1 if position < 2 else 0 for position in positions.tolist()]


def test_padded_vocabulary_is_never_sampled_and_has_no_probability(world):
    logits = torch.zeros(500, 8)
    for sampling in (Sampling(), Sampling(top_k=7), Sampling(top_p=0.99)):
        choice = chosen(logits, sampling, world, vocab_size=5)
        assert int(choice.tokens.max()) < 5
        torch.testing.assert_close(choice.logps, torch.full((500,), -math.log(5)))


def test_near_ties_are_what_a_small_error_could_change(world):
    tie = torch.tensor([[1.0, 1.0004, -9.0]])
    for sampling in (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0.01)):
        assert chosen(tie, sampling, world).near_ties.all(), sampling
    clear = torch.tensor([[1.0, 3.0, -9.0]])
    for sampling in (Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0.01)):
        assert not chosen(clear, sampling, world).near_ties.any(), sampling
    # softmax of [1, 3] puts 0.8808 before the second token: a boundary there is in doubt, but only matters if it wins
    keys, positions = noise_keys(3000)
    noise = gumbel(keys, positions, torch.arange(3))
    would_win = (noise[:, 0] + 1.0 > noise[:, 1] + 3.0) & (noise[:, 0] + 1.0 > noise[:, 2] - 9)
    near = chosen(clear.expand(3000, -1), Sampling(top_p=0.8808), world).near_ties
    assert torch.equal(near, would_win)


def test_settings_that_make_no_sense_are_refused_together():
    with pytest.raises(ConfigError) as error:
        Sampling(temperature=-1, top_k=-2, top_p=0, max_new_tokens=0)
    assert [text.split()[0] for text in error.value.violations] == ["temperature", "top_k", "top_p", "max_new_tokens"]


def sharded_choices(rank: int, world_size: int, logits: torch.Tensor, vocab_size: int, samplings: list[Sampling]):
    width = logits.shape[1] // world_size
    keys, positions = noise_keys(len(logits))
    shard = Shard(rank * width, width, vocab_size, torch.distributed.group.WORLD)
    mine = logits[:, shard.start : shard.start + width]
    return [choose(mine.clone(), keys, positions, sampling, shard) for sampling in samplings]


def test_vocabulary_shards_choose_the_same_tokens(world):
    logits = torch.randn(300, 102, generator=torch.Generator().manual_seed(2)) * 3
    samplings = [
        Sampling(temperature=0),
        Sampling(),
        Sampling(temperature=0.7, top_k=4),
        Sampling(top_p=0.9),
        Sampling(top_k=90, top_p=0.8, min_new_tokens=3, stop_ids=(0, 60, 100)),
    ]
    ranks = run_on_ranks(2, sharded_choices, logits, 101, samplings)
    for sampling, *sharded in zip(samplings, *ranks, strict=True):
        whole = chosen(logits, sampling, world, vocab_size=101)
        for choice in sharded:
            assert torch.equal(choice.tokens, whole.tokens), sampling
            assert torch.equal(choice.near_ties, whole.near_ties), sampling
            torch.testing.assert_close(choice.logps, whole.logps, rtol=0, atol=1e-5)


def best_two_by_float64(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (probs.double().log() + noise.double()).topk(2, dim=-1).indices


@pytest.mark.parametrize("spread_of_logits", [0.0, 1.0, 4.0, 30.0])
def test_noise_is_worked_out_to_the_end_for_every_token_that_can_win(spread_of_logits):
    keys, positions = noise_keys(64)
    ids = torch.arange(1000)
    probs = (torch.randn(64, 1000, generator=torch.Generator().manual_seed(4)) * spread_of_logits).softmax(-1)
    bits = hashed(*position_keys(keys, positions), spread(ids))
    expected = best_two_by_float64(probs, gumbel(keys, positions, ids))
    assert torch.equal(_two_first(probs, bits)[1], expected)


def test_tokens_left_out_of_the_last_round_are_looked_at_when_they_could_win():
    # u close to 1 makes E nine times u: eight tokens have the greatest p / u, the last two the greatest p / E
    probs = torch.tensor([[0.11] * 8 + [0.05, 0.049]])
    u = torch.tensor([[0.9999] * 8 + [0.5, 0.5]], dtype=torch.float64)
    bits = (u * 2**32).long()
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).int()
    values, columns = _two_first(probs, bits)
    assert columns.tolist() == [[8, 9]]
    torch.testing.assert_close(values, torch.tensor([[0.05, 0.049]]) / math.log(2))
