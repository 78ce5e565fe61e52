"""Fused vocabulary-parallel log-probs and entropies against torch's log_softmax on whole logits."""

import pytest
import torch

from tests.distributed.pool import run_on_ranks

VOCABULARY, HIDDEN, TOKENS = 21, 8, 13


def inputs(dtype=torch.float32, padded: int = 24):
    """hidden [N, H], padded weight [V, H] (padding rows large, so that a leak shows), targets with masked places."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=generator).to(dtype)
    weight[VOCABULARY:] = 5.0
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[[2, 7]] = torch.tensor([-1, -100])
    slopes = torch.randn(2, TOKENS, generator=generator)
    return hidden, weight, targets, slopes


def dense(hidden, weight, targets, temperature: float, vocabulary: int, softcap: float | None = None):
    """The independent answer."""
    logits = hidden.float() @ weight[:vocabulary].float().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    logp = log_p.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logp.where(targets >= 0, 0.0), entropy.where(targets >= 0, 0.0)


def compare_with_dense(
    group,
    rank: int,
    tp: int,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
    tile_bytes: int | None = None,
) -> None:
    """Values and gradients of this rank's shard; the gradient of hidden is summed over the group first."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, slopes = inputs()
    expected_inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = dense(*expected_inputs, targets, temperature, VOCABULARY, softcap)
    (slopes[0] * expected[0] + slopes[1] * expected[1]).sum().backward()

    hidden.requires_grad_()
    shard = weight.chunk(tp)[rank].clone().requires_grad_()
    logp, entropy = fused_logprob(
        copy_to_tensor_model_parallel_region(hidden, group=group),
        shard,
        targets,
        group=group,
        vocab_size=VOCABULARY,
        temperature=temperature,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        tile_bytes=tile_bytes,
        with_entropy=True,
    )
    (slopes[0] * logp + slopes[1] * entropy).sum().backward()
    torch.testing.assert_close(logp, expected[0])
    torch.testing.assert_close(entropy, expected[1])
    torch.testing.assert_close(hidden.grad, expected_inputs[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shard.grad, expected_inputs[1].grad.chunk(tp)[rank], rtol=1e-4, atol=1e-5)
    assert not hidden.grad[targets < 0].any()


def compare_on_rank(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    for temperature, chunk_tokens, softcap, tile_bytes in (
        (1.0, 1024, None, None),
        (0.7, 5, None, 100),
        (0.7, 5, 1.5, 60),
    ):
        compare_with_dense(dist.group.WORLD, rank, world_size, temperature, chunk_tokens, softcap, tile_bytes)


@pytest.mark.parametrize("softcap", [None, 0.8, 30.0])
@pytest.mark.parametrize("temperature, chunk_tokens", [(1.0, 1024), (1.0, 5), (0.7, 1), (2.0, 13)])
@pytest.mark.parametrize("tile_bytes", [None, 1, 100, 416])
def test_value_and_gradient_match_dense_on_one_rank(world, temperature, chunk_tokens, softcap, tile_bytes):
    compare_with_dense(world, 0, 1, temperature, chunk_tokens, softcap, tile_bytes)


def test_value_and_gradient_match_dense_on_two_ranks():
    run_on_ranks(2, compare_on_rank)


def logp_of_logits(group, logits: list[float], target: int, padded: int, tp: int, rank: int, temperature: float = 1.0):
    """logp, entropy, dlogp/dlogits [V] (this rank's part) for given logits: hidden is 1, the weight is the logits."""
    from megarlhf.parallel.logprob import fused_logprob

    weight = torch.zeros(padded, 1)
    weight[: len(logits), 0] = torch.tensor(logits)
    shard = weight.chunk(tp)[rank].clone().requires_grad_()
    logp, entropy = fused_logprob(
        torch.ones(1, 1),
        shard,
        torch.tensor([target]),
        group=group,
        vocab_size=len(logits),
        temperature=temperature,
        with_entropy=True,
    )
    logp.sum().backward()
    return logp.item(), entropy.item(), shard.grad[:, 0].tolist()


def known_numbers_on_rank(rank: int, world_size: int, padded: int):
    import torch.distributed as dist

    return logp_of_logits(dist.group.WORLD, [1, 2, 3, -1, 0.5], 2, padded, world_size, rank)


@pytest.mark.parametrize("padded", [6, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_padding_never_leaks_and_every_shard_gets_its_gradient(world, tp, padded):
    known = [-0.084394, -0.229406, 0.376409, -0.011421, -0.051187] + [0.0] * (padded - 5)
    if tp == 1:
        answers = [logp_of_logits(world, [1, 2, 3, -1, 0.5], 2, padded, 1, 0)]
    else:
        answers = run_on_ranks(tp, known_numbers_on_rank, padded)
    for logp, entropy, _ in answers:
        assert logp == pytest.approx(-0.472261, abs=1e-6)
        assert entropy == pytest.approx(1.044109, abs=1e-6)
    assert sum((gradient for _, _, gradient in answers), []) == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize(
    "temperature, logp, entropy", [(0.5, -0.018150, 0.090095), (1.0, -0.126928, 0.365334), (2.0, -0.313262, 0.582203)]
)
def test_temperature_scales_logits_once_for_logp_and_entropy(world, temperature, logp, entropy):
    for _ in range(2):
        found = logp_of_logits(world, [2, 0], 0, 2, 1, 0, temperature)
        assert found[:2] == (pytest.approx(logp, abs=1e-6), pytest.approx(entropy, abs=1e-6))


def test_inputs_are_left_as_they_were(world):
    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, _ = inputs()
    kept = hidden.clone(), weight.clone()
    first, _ = fused_logprob(hidden, weight, targets, group=world, vocab_size=VOCABULARY, temperature=0.5)
    second, _ = fused_logprob(hidden, weight, targets, group=world, vocab_size=VOCABULARY, temperature=0.5)
    assert torch.equal(first, second) and torch.equal(hidden, kept[0]) and torch.equal(weight, kept[1])


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 150, 10**6])
def test_kept_logits_give_the_gradients_of_computed_ones_and_a_second_backward_pass_too(
    world, kept_bytes, with_entropy
):
    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, slopes = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    expected = dense(hidden, weight, targets, 0.7, VOCABULARY, 3.0)
    loss = (slopes[0] * expected[0]).sum() + with_entropy * (slopes[1] * expected[1]).sum()
    answers = torch.autograd.grad(loss, (hidden, weight))
    options = {"group": world, "vocab_size": VOCABULARY, "temperature": 0.7, "softcap": 3.0, "kept_bytes": kept_bytes}
    options |= {"tile_bytes": 100, "chunk_tokens": 5, "with_entropy": with_entropy}
    logp, entropy = fused_logprob(hidden, weight, targets, **options)
    loss = (slopes[0] * logp).sum() + ((slopes[1] * entropy).sum() if with_entropy else 0)
    for retain_graph in (True, False):
        found = torch.autograd.grad(loss, (hidden, weight), retain_graph=retain_graph)
        torch.testing.assert_close(found, answers, rtol=1e-4, atol=1e-5)


def test_the_weights_gradient_is_added_where_it_is_asked_for(world):
    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, slopes = inputs()
    weight.requires_grad_()
    answer = torch.autograd.grad((slopes[0] * dense(hidden, weight, targets, 1.0, VOCABULARY)[0]).sum(), weight)[0]
    total = torch.ones_like(weight)
    options = {"group": world, "vocab_size": VOCABULARY, "weight_gradient": total}
    (slopes[0] * fused_logprob(hidden, weight, targets, **options)[0]).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(total, 1 + answer, rtol=1e-4, atol=1e-5)


def test_huge_logits_stay_finite(world):
    logp, entropy, gradient = logp_of_logits(world, [1e4, 0.0, -1e4], 1, 4, 1, 0)
    assert logp == pytest.approx(-1e4) and entropy == pytest.approx(0.0, abs=1e-6)
    assert gradient == pytest.approx([-1.0, 1.0, 0.0, 0.0])


def test_bfloat16_inputs_are_measured_in_float32(world):
    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, _ = inputs(torch.bfloat16)
    logp, _ = fused_logprob(hidden, weight, targets, group=world, vocab_size=VOCABULARY)
    expected, _ = dense(hidden, weight, targets, 1.0, VOCABULARY)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected)


def test_no_position_is_a_valid_question_and_a_foreign_target_is_not(world):
    from megarlhf.parallel.logprob import fused_logprob

    hidden, weight, targets, _ = inputs()
    logp, entropy = fused_logprob(hidden[:0], weight, targets[:0], group=world, vocab_size=VOCABULARY)
    assert logp.shape == (0,) and entropy is None
    with pytest.raises(ValueError, match="not in a vocabulary of 21"):
        fused_logprob(hidden, weight, targets.clamp(min=21), group=world, vocab_size=VOCABULARY)
