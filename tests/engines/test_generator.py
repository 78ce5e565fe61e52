"""Generated tokens against transformers and a full forward, in every layout, batch order and number of slots."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from megarlhf import device
from megarlhf.config.layout import Layout
from megarlhf.engines.generator import Completion, GenerationReport, Generator, Request, Sampling
from megarlhf.engines.generator.generator import share_requests
from megarlhf.errors import DataError, LayoutError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.load import load_weights
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama

LENGTHS = (3, 9, 1, 14, 5, 7, 2, 11)
GREEDY = Sampling(temperature=0, max_new_tokens=12)
SAMPLED = Sampling(temperature=0.9, max_new_tokens=12, stop_ids=(0, 5, 17), seed=7, step=3)


def random_prompts(vocab_size: int, lengths=LENGTHS) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(2, vocab_size, (length,), generator=generator).tolist()) for length in lengths]


PROMPTS = random_prompts(101)
REQUESTS = [Request(prompt, row) for row, prompt in enumerate(PROMPTS)]
PAIRS = [Request(prompt, row, sample) for row, prompt in enumerate(PROMPTS) for sample in range(2)]


def build(folder, layout: Layout, world_size: int) -> Model:
    groups = build_groups(layout, world_size)
    model = build_model(Architecture.from_folder(folder), groups, head="vocabulary", dtype=torch.float32, seed=None)
    load_weights(model, folder)
    return model


def generate_on_rank(_rank: int, world_size: int, folder, layout: Layout, jobs, max_slots: int):
    generator = Generator(build(folder, layout, world_size), max_slots)
    return [generator.generate(requests, sampling) for requests, sampling in jobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("generator") / "tiny")


@pytest.fixture(scope="module")
def model(folder) -> Model:
    device.join_world()
    return build(folder, Layout(), 1)


@pytest.fixture(scope="module")
def transformers_model(folder):
    return load_transformers(folder)


def load_transformers(folder):
    from transformers import AutoModelForCausalLM

    # Eager: the default attention of transformers 4.57 leaves out Gemma 2's soft-cap.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy_by_transformers(model, prompt: tuple[int, ...], num_new: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    ids = torch.tensor([prompt])
    stops = {"eos_token_id": list(stop_ids)} if stop_ids else {"eos_token_id": None}
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=1, **stops)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def greedy_texts(transformers_model) -> list[list[int]]:
    return [greedy_by_transformers(transformers_model, prompt, 12) for prompt in PROMPTS]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def assert_same_until_near_tie(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        end = min([*one.near_ties, *other.near_ties, max(len(one.token_ids), len(other.token_ids))])
        assert one.token_ids[:end] == other.token_ids[:end]
        assert_close(torch.tensor(one.logps[:end]), torch.tensor(other.logps[:end]), rtol=0, atol=2e-5)


def test_greedy_equals_transformers_for_a_ragged_batch(model, greedy_texts):
    assert tokens_of(Generator(model, max_slots=8).generate(REQUESTS, GREEDY)) == greedy_texts


def test_refilled_slots_give_what_each_prompt_gives_alone(model):
    together = Generator(model, max_slots=3, prefill_tokens=16).generate(REQUESTS, GREEDY)
    for request, completion in zip(REQUESTS, together, strict=True):
        (alone,) = Generator(model, max_slots=1).generate([request], GREEDY)
        assert completion.token_ids == alone.token_ids
        assert_close(torch.tensor(completion.logps), torch.tensor(alone.logps), rtol=0, atol=1e-5)


def test_who_waits_is_told_how_many_requests_are_answered(model):
    told = []
    Generator(model, max_slots=3, follow=lambda *numbers: told.append(numbers)).generate(REQUESTS, GREEDY)
    assert told[0] == (0, len(REQUESTS)) and told[-1] == (len(REQUESTS), len(REQUESTS)) and told == sorted(told)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout()], ids=["tp2", "pp2", "dp2"])
def test_layouts_of_two_ranks_agree_with_one(folder, model, greedy_texts, layout):
    restricted = Sampling(temperature=1.1, top_k=20, top_p=0.9, min_new_tokens=3, max_new_tokens=9, stop_ids=(0, 5, 17))
    jobs = [(REQUESTS, GREEDY), (PAIRS, SAMPLED), (PAIRS[::-1], SAMPLED), (PAIRS, restricted)]
    ranks = run_on_ranks(2, generate_on_rank, folder, layout, jobs, 5)
    assert ranks[0] == ranks[1]
    greedy, sampled, backwards, cut = ranks[0]
    assert tokens_of(greedy) == greedy_texts
    generator = Generator(model, max_slots=16)
    assert_same_until_near_tie(sampled, generator.generate(PAIRS, SAMPLED))
    assert_same_until_near_tie(backwards[::-1], sampled)
    assert_same_until_near_tie(cut, generator.generate(PAIRS, restricted))


@pytest.mark.parametrize("changes", [{"tied": True}, {"llama3": True}, {"num_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["tp2", "pp2"])
def test_other_architectures_equal_transformers(tmp_path, changes, layout):
    folder = write_llama(tmp_path / "model", **changes)
    expected = [greedy_by_transformers(load_transformers(folder), prompt, 12) for prompt in PROMPTS]
    for (completions,) in run_on_ranks(2, generate_on_rank, folder, layout, [(REQUESTS, GREEDY)], 4):
        assert tokens_of(completions) == expected


def test_sampled_text_does_not_depend_on_order_slots_or_batch(model):
    generator = Generator(model, max_slots=16)
    whole = generator.generate(PAIRS, SAMPLED)
    order = torch.randperm(len(PAIRS), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Generator(model, max_slots=3, prefill_tokens=10).generate([PAIRS[i] for i in order], SAMPLED)
    assert_same_until_near_tie(shuffled, [whole[i] for i in order])
    few = generator.generate(PAIRS[4:7], SAMPLED)
    assert_same_until_near_tie(few, whole[4:7])
    assert generator.generate(PAIRS, SAMPLED) == whole


def test_repacked_weights_and_the_layers_own_modules_agree(model):
    # short generations use the modules as they are, longer ones a blocked copy of the weights on a CPU
    generator = Generator(model, max_slots=5)
    short = generator.generate(PAIRS, Sampling(max_new_tokens=7))
    long = generator.generate(PAIRS, Sampling(max_new_tokens=12))
    cut = [Completion(c.token_ids[:7], c.logps[:7], "length", tuple(i for i in c.near_ties if i < 7)) for c in long]
    assert_same_until_near_tie(short, cut)


@pytest.mark.parametrize("num_new", [7, 12])
def test_bfloat16_logprobs_are_close_to_a_float32_forward(folder, transformers_model, num_new):
    groups = build_groups(Layout(), 1)
    model = build_model(Architecture.from_folder(folder), groups, head="vocabulary", dtype=torch.bfloat16, seed=None)
    load_weights(model, folder)
    found = Generator(model, 4).generate(REQUESTS, Sampling(max_new_tokens=num_new))
    for request, completion in zip(REQUESTS, found, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logp = transformers_model(ids).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logp.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert_close(torch.tensor(completion.logps), expected, rtol=0, atol=0.25)


def test_step_seed_row_and_sample_change_the_text(model):
    generator = Generator(model, max_slots=16)
    prompt = PROMPTS[0]
    texts = set()
    for seed, step in ((0, 0), (1, 0), (0, 1)):
        requests = [Request(prompt, row, sample) for row in range(2) for sample in range(2)]
        found = generator.generate(requests, Sampling(max_new_tokens=8, seed=seed, step=step))
        texts |= {completion.token_ids for completion in found}
    assert len(texts) == 12


def test_logprobs_equal_a_full_forward(model, transformers_model):
    for sampling in (GREEDY, SAMPLED, Sampling(temperature=2.0, top_k=3, min_new_tokens=5, stop_ids=(5, 17))):
        for request, found in zip(REQUESTS, Generator(model, 4).generate(REQUESTS, sampling), strict=True):
            ids = torch.tensor([[*request.prompt_ids, *found.token_ids]])
            with torch.no_grad():
                logits = transformers_model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            scale = sampling.temperature or 1.0
            expected = (logits / scale).log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
            assert_close(torch.tensor(found.logps), expected, rtol=0, atol=1e-5)


def test_several_stop_tokens_end_a_response_and_belong_to_it(model, transformers_model, greedy_texts):
    stops = (greedy_texts[0][4], greedy_texts[1][2])
    sampling = Sampling(temperature=0, max_new_tokens=12, stop_ids=stops)
    for request, found in zip(REQUESTS, Generator(model, 3).generate(REQUESTS, sampling), strict=True):
        expected = greedy_by_transformers(transformers_model, request.prompt_ids, 12, stops)
        assert list(found.token_ids) == expected
        assert found.finish_reason == ("stop" if expected[-1] in stops else "length")


def test_a_stop_token_at_once_is_a_response_of_length_one(model, greedy_texts):
    sampling = Sampling(temperature=0, max_new_tokens=12, stop_ids=(greedy_texts[2][0],))
    found = Generator(model, 3).generate(REQUESTS, sampling)[2]
    assert found.token_ids == (greedy_texts[2][0],) and found.finish_reason == "stop" and len(found.logps) == 1


def test_a_response_without_end_is_cut_without_a_false_end_token(model):
    for found in Generator(model, 3).generate(REQUESTS, GREEDY):
        assert len(found.token_ids) == 12 and found.finish_reason == "length"


def test_stop_tokens_wait_for_min_new_tokens(model, greedy_texts):
    stop = greedy_texts[0][0]
    sampling = Sampling(temperature=0, max_new_tokens=12, min_new_tokens=6, stop_ids=(stop,))
    for found in Generator(model, 3).generate(REQUESTS, sampling):
        assert stop not in found.token_ids[:6] and len(found.token_ids) >= 6


@pytest.mark.parametrize("max_slots", [2, 3, 24])
def test_samples_of_a_prompt_share_its_prefill(model, max_slots):
    requests = [Request(prompt, row, sample) for row, prompt in enumerate(PROMPTS) for sample in range(5)]
    generator = Generator(model, max_slots)
    found = generator.generate(requests, SAMPLED)
    assert generator.report.num_prefilled_tokens == sum(LENGTHS)
    assert len({completion.token_ids for completion in found}) > 30
    alone = Generator(model, 1).generate([requests[13]], SAMPLED)
    assert_same_until_near_tie(alone, found[13:14])


def test_data_parallel_ranks_sample_differently_on_uniform_logits(tmp_path):
    # a head of zeros: the text is pure noise, so equal seeds on two ranks would show
    folder = write_llama(tmp_path / "uniform")
    _zero_head(folder)
    requests = [Request((7, 8, 9), row, sample) for row in range(4) for sample in range(2)]
    jobs = [(requests, Sampling(max_new_tokens=8))] * 2
    (first, again), other = run_on_ranks(2, generate_on_rank, folder, Layout(), jobs, 4)
    assert first == again == other[0]
    assert len({completion.token_ids for completion in first}) == 8


def _zero_head(folder) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_near_ties_are_counted(model):
    generator = Generator(model, 8)
    found = generator.generate(PAIRS * 20, SAMPLED)
    assert isinstance(generator.report, GenerationReport)
    assert generator.near_ties == sum(len(completion.near_ties) for completion in found)
    assert generator.report.num_tokens == sum(len(completion.token_ids) for completion in found)


def test_requests_are_shared_once_each_and_evenly():
    requests = [Request((1,) * length, row, sample) for row, length in enumerate(LENGTHS) for sample in range(4)]
    for dp in (1, 2, 3):
        shares = share_requests(requests, 10, dp)
        assert sorted(index for share in shares for index in share) == list(range(32))
        assert max(map(len, shares)) - min(map(len, shares)) <= 32 // (4 * dp) + 2
    assert sorted(map(len, share_requests([Request((1, 2), 0, sample) for sample in range(8)], 10, 2))) == [4, 4]
    assert share_requests([Request((1,), 0)], 10, 3).count([]) == 2


def test_a_rank_without_requests_still_gets_every_answer(folder, greedy_texts):
    for (found,) in run_on_ranks(2, generate_on_rank, folder, Layout(), [(REQUESTS[:1], GREEDY)], 4):
        assert tokens_of(found) == greedy_texts[:1]


def test_prompts_that_cannot_be_generated_from_are_refused(model):
    generator = Generator(model, 4)
    for prompt, words in (((), "1 to 116"), ((3,) * 117, "128 positions"), ((3, 101), "vocabulary of 101")):
        with pytest.raises(DataError, match=words):
            generator.generate([Request((4,), 0), Request(prompt, 9)], GREEDY)
    assert generator.generate([], GREEDY) == []
    with pytest.raises(DataError, match="max_new_tokens 128 leaves no room .* choose 127 or less"):
        generator.generate([Request((4,), 0)], replace(GREEDY, max_new_tokens=128))


def refuse_sequence_parallelism(_rank: int, world_size: int, folder) -> str:
    with pytest.raises(LayoutError) as error:
        Generator(build(folder, Layout(tp=2, sp=True), world_size), 4)
    return str(error.value)


def test_sequence_parallel_layouts_are_refused(folder):
    assert "tp and pp only" in run_on_ranks(2, refuse_sequence_parallelism, folder)[0]


def test_generation_leaves_the_model_as_it_was(model):
    before = {key: parameter.clone() for key, parameter in model.named_parameters().items()}
    model.chunks[0].train()
    Generator(model, 4).generate(REQUESTS, SAMPLED)
    assert model.chunks[0].training
    assert all(torch.equal(parameter, before[key]) for key, parameter in model.named_parameters().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.named_parameters().values())
