"""Real weights: SmolLM2-135M-Instruct in float32 under four layouts against transformers, and back to a folder."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from checkpoints_tools import command, hf_to_megatron, megatron_to_hf
from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.forward import full_logits
from megarlhf.weights.export import export_model
from megarlhf.weights.hf_config import COMPANIONS
from tests.distributed.pool import run_on_ranks
from tests.models.helpers import load_on_rank, reference_logits, stream, through_stages

FOLDER = Path(__file__).parents[2] / "assets" / "SmolLM2-135M-Instruct"
TEXTS = (
    "The capital of France is Paris, which is known for the Eiffel Tower.",
    "I watched this film twice and would gladly watch it again:",
    "2, 3, 5, 7, 11",
)

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="assets/SmolLM2-135M-Instruct is not there: run `make assets`"),
    pytest.mark.slow,
]


def logits_on_rank(rank, world_size, layout, rows, target):
    """Logits on the last stage's first tensor rank, and an export to `target` if there is one."""
    model = load_on_rank(world_size, FOLDER, layout)
    with torch.no_grad():
        hidden = through_stages(model, stream(rows))
        logits = None if hidden is None else full_logits(model, hidden)
    if target is not None:
        export_model(model, target, source_folder=FOLDER, max_shard_bytes=200 * 2**20)
    return logits if model.groups.coordinates.tp == 0 else None


@pytest.fixture(scope="module")
def rows():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [torch.tensor(tokenizer(text).input_ids) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(rows):
    return reference_logits(FOLDER, rows)


def test_one_rank_gives_the_logits_of_transformers(rows, expected, single_rank):
    logits = logits_on_rank(0, 1, Layout(), rows, None)
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(pp=2), Layout(pp=3)], ids=str)
def test_a_divided_model_gives_the_logits_of_transformers(rows, expected, layout):
    (logits,) = [one for one in run_on_ranks(layout.model_ranks, logits_on_rank, layout, rows, None) if one is not None]
    assert (logits - expected).abs().max() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def test_all_272_tensors_come_back_bit_for_bit(tmp_path, rows):
    run_on_ranks(3, logits_on_rank, Layout(tp=3), rows, tmp_path / "back")
    found, original = tensors_of(tmp_path / "back"), tensors_of(FOLDER)
    assert found.keys() == original.keys() and len(found) == 272
    assert all(torch.equal(found[name], original[name].float()) for name in original)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()


def test_the_converter_gives_back_every_bit_and_every_file_of_the_tokenizer(tmp_path):
    import transformers

    there = [str(FOLDER), str(tmp_path / "megatron"), "--tp", "3", "--pp", "2", "--workers", "2"]
    assert command.guarded(hf_to_megatron.main, there) == command.DONE
    assert command.guarded(megatron_to_hf.main, [str(tmp_path / "megatron"), str(tmp_path / "back")]) == command.DONE
    found, original = tensors_of(tmp_path / "back"), tensors_of(FOLDER)
    assert found.keys() == original.keys() and len(found) == 272
    for name, tensor in original.items():
        assert tensor.dtype == found[name].dtype and tensor.shape == found[name].shape
        assert torch.equal(tensor.view(torch.uint8), found[name].view(torch.uint8)), name
    kept = [file.name for pattern in COMPANIONS for file in FOLDER.glob(pattern)]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(kept)
    for name in kept:
        assert (tmp_path / "back" / name).read_bytes() == (FOLDER / name).read_bytes(), name
    assert Architecture.from_folder(tmp_path / "back") == Architecture.from_folder(FOLDER)
    one, other = (transformers.AutoConfig.from_pretrained(path) for path in (FOLDER, tmp_path / "back"))
    for field in ("rms_norm_eps", "hidden_size", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
        assert getattr(one, field) == getattr(other, field), field
