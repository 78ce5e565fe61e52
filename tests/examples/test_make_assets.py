"""The asset script writes a folder that both transformers read alike, and prompts that are openings of reviews."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_assets", ROOT / "examples" / "make_assets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_folder() -> Path:
    if not MODEL.exists():
        pytest.skip("no assets/: run examples/make_assets.py")
    return MODEL


def test_openings_are_the_first_words_without_markup_each_once(script):
    reviews = ["One two<br /><br />three four five", "too short", "One two three four again", "a b c d"]
    assert script.review_openings(reviews, num_words=3) == ["One two three", "a b c"]


def test_demonstrations_are_favourable_and_end_with_a_sentence(script):
    opening, rest = "one two three four five six seven eight", "a b c d e f g h. i j k l m n o p! q r"
    reviews = [script.Review(f"{opening} {rest}", True), script.Review(f"{opening} {rest}", False)]
    assert script.demonstrations(reviews) == [{"prompt": opening, "response": " a b c d e f g h. i j k l m n o p!"}]


def test_preferences_are_favourable_last_sentences(script):
    def review(verdict: str, is_favourable: bool):
        opening = f"{verdict} one two three four five six seven."
        return script.Review(f"{opening} It is a {verdict} film to go and see.", is_favourable)

    reviews = [review("good", True), review("fine", True), review("bad", False)]
    rows = script.preferences(reviews)
    assert [row["prompt"].split()[0] for row in rows] == ["good", "fine", "bad"]
    assert [row["chosen"].split()[3] for row in rows] == ["fine", "good", "fine"]
    assert {row["rejected"] for row in rows} == {" It is a bad film to go and see."}
    assert [row["label"] for row in script.labels(reviews)] == [True, False] * 3


def test_rows_are_put_back_into_the_order_of_the_two_halves(script):
    # Two heads of size 4: GGUF has rows 0 2 1 3 of each head's halves [0 1 | 2 3].
    rows = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7.0])[:, None]
    assert script.unpermuted(rows, 2).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_is_there_is_left_alone(script, tmp_path):
    for folder in (script.MODEL, script.CRITIC):
        (tmp_path / folder).mkdir()
    for name in script.FILES:
        (tmp_path / name).write_text("mine")
    script.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {script.MODEL, script.CRITIC, *script.FILES}
    assert not list((tmp_path / script.MODEL).iterdir()) and not list((tmp_path / script.CRITIC).iterdir())
    assert all((tmp_path / name).read_text() == "mine" for name in script.FILES)


def test_a_failure_leaves_nothing_behind(script, tmp_path, monkeypatch):
    for name in script.FILES:
        (tmp_path / name).write_text("mine")

    def fails(folder):
        (folder / "half.txt").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(script, "make_model", fails)
    with pytest.raises(OSError, match="disk full"):
        script.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(script.FILES)


def test_the_model_folder_is_spelled_for_both_transformers(model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert json.loads((model_folder / "tokenizer_config.json").read_text())["tokenizer_class"] != "TokenizersBackend"


def test_the_model_and_its_tokenizer_write_english(model_folder):
    from transformers import AutoModelForCausalLM

    from megarlhf.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert tokenizer.vocab_size == model.config.vocab_size
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(100000.0 ** (-2 / 64))
    prompt = tokenizer.encode_prompt("The capital of France is")
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False)[0]
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert tokenizer.stop_ids == (2,)


def test_its_chat_opens_with_its_own_system_turn(model_folder):
    from megarlhf.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_folder)
    text = tokenizer.prompt_text([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.encode_prompt([{"role": "user", "content": "hi"}]).count(tokenizer.bos_id) == 3


def test_digits_stand_alone_and_text_survives(model_folder):
    from megarlhf.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_folder)
    assert len(tokenizer.encode_prompt("20251129")) == 8
    for text in ("I'd  give it 9.5/10, é漢字🙂\n", " leading", "tabs\tand ½"):
        assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
