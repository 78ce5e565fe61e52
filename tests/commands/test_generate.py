"""`megarlhf generate`: the file it writes, in every layout, and what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from megarlhf import cli, device
from megarlhf.commands import chat
from megarlhf.commands.generate import GenerateRun, main, require_valid, run_generate
from megarlhf.errors import ConfigError, DataError
from megarlhf.loop.inference import Summary
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama

ROWS = [
    {"id": "first", "prompt": "Hello"},
    {"id": 7, "messages": [{"role": "user", "content": "How are you?"}]},
    {"prompt": "x"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("generate") / "tiny")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run_here(folder, settings: GenerateRun) -> list[dict]:
    rank, world_size = device.join_world()
    run_generate(str(folder), settings, rank, world_size)
    return read(settings.out)


def read(path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def run_on_rank(rank: int, world_size: int, folder, settings: GenerateRun) -> Summary:
    require_valid(str(folder), settings, world_size)
    return run_generate(str(folder), settings, rank, world_size)


def test_one_line_per_sample_with_the_prompts_ids(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    rows = run_here(folder, GenerateRun(prompts=str(prompts), out=str(out), samples_per_prompt=2, max_new_tokens=9))
    assert [(row["id"], row["sample"]) for row in rows] == [(i, s) for i in ("first", 7, 2) for s in (0, 1)]
    for row in rows:
        assert list(row) == ["id", "sample", "response", "token_ids", "logprobs", "finish_reason"]
        assert len(row["token_ids"]) == len(row["logprobs"]) <= 9 and max(row["logprobs"]) <= 0
        assert row["finish_reason"] == ("stop" if row["token_ids"][-1] == 0 else "length")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def test_greedy_response_is_that_of_transformers(folder, prompts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = GenerateRun(prompts=str(prompts), out=str(tmp_path / "out.jsonl"), temperature=0, max_new_tokens=10)
    found = run_here(folder, settings)[0]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=1
    )[0, ids.shape[1] :]
    assert found["token_ids"] == expected.tolist()
    assert found["response"] == tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_every_layout_writes_the_same_texts(folder, prompts, tmp_path, layout):
    settings = GenerateRun(prompts=str(prompts), out=str(tmp_path / "one"), samples_per_prompt=2, max_new_tokens=9)
    one = run_here(folder, settings)
    settings = replace(settings, out=str(tmp_path / "two"), **layout)
    reports = run_on_ranks(2, run_on_rank, folder, settings)
    assert "6 responses" in reports[0].sentence and reports[0].numbers["num_near_ties"] == 0
    for alone, shared in zip(one, read(settings.out), strict=True):
        assert shared == alone | {"logprobs": pytest.approx(alone["logprobs"], abs=1e-4)}


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Random LoRA adapters of the model, written by PEFT itself, and the model with them merged in, by PEFT too."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    top = tmp_path_factory.mktemp("adapters")
    settings = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(top / "peft")
    model.merge_and_unload().save_pretrained(top / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (top / "merged" / name).write_bytes((folder / name).read_bytes())
    return top


def test_adapters_generate_what_the_merged_model_generates(adapters, folder, prompts, tmp_path):
    settings = GenerateRun(prompts=str(prompts), temperature=0, max_new_tokens=9)
    found, other = (
        run_here(path, replace(settings, out=str(tmp_path / path.name), base=base))
        for path, base in ((adapters / "peft", ""), (folder, ""))
    )
    merged = run_here(adapters / "merged", replace(settings, out=str(tmp_path / "out")))
    texts, changed = ([row["token_ids"] for row in rows] for rows in (found, other))
    assert texts == [row["token_ids"] for row in merged] and texts != changed
    moved = tmp_path / "moved"
    shutil.copytree(adapters / "peft", moved)
    config = json.loads((moved / "adapter_config.json").read_text()) | {"base_model_name_or_path": "some/where"}
    (moved / "adapter_config.json").write_text(json.dumps(config))
    settings = replace(settings, out=str(tmp_path / "again"))
    with pytest.raises(ConfigError, match="adapters are for some/where, which is no model folder here; .* --base"):
        require_valid(str(moved), settings, 1)
    settings = replace(settings, base=str(folder))
    require_valid(str(moved), settings, 1)
    assert [row["token_ids"] for row in run_here(moved, settings)] == texts
    with pytest.raises(ConfigError, match="--base: .* holds no LoRA adapters"):
        require_valid(str(folder), settings, 1)
    (moved / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True, "target_modules": "all-linear"}))
    with pytest.raises(ConfigError, match="use_dora is True; target_modules is 'all-linear'"):
        require_valid(str(moved), settings, 1)


def test_chat_talks_with_adapters(adapters, monkeypatch, capsys):
    lines = iter(["Hello", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    answers = []
    for model in ("peft", "merged"):
        lines = iter(["Hello", ""])
        assert chat.main([str(adapters / model), "--temperature", "0", "--max_new_tokens", "9"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(answers[0].splitlines()) > 1


def test_everything_wrong_is_told_at_once(folder, tmp_path):
    flags = f"--prompts p --out {tmp_path}/no/out --samples_per_prompt 0 --temperature -1 --top_p 2 --tp 3 --pp 5"
    with pytest.raises(ConfigError) as error:
        main([str(folder), *flags.split()])
    text = str(error.value)
    for words in (
        "--out: folder",
        "--samples_per_prompt 0",
        "--temperature -1.0",
        "--top_p 2.0",
        "tp 3",
        "torchrun --nproc-per-node 15",
    ):
        assert words in text
    assert "not given" not in text


def test_files_that_cannot_be_are_told_before_anything_is_read(folder, tmp_path):
    with pytest.raises(ConfigError) as caught:
        require_valid(str(folder), GenerateRun(prompts=str(tmp_path / "none.jsonl"), out=str(tmp_path)), 1)
    assert caught.value.violations == (
        f"--prompts: {tmp_path}/none.jsonl does not exist; name a JSONL file",
        f"--out: {tmp_path} is a folder; name a file",
    )


def without_tokenizer(folder, copy):
    """A copy of the model's folder whose tokenizer was forgotten."""
    shutil.copytree(folder, copy, ignore=lambda _, names: [name for name in names if name.startswith("tokenizer")])
    return copy


def test_a_missing_tokenizer_and_stop_tokens_that_are_several_are_told_before_weights_are_read(
    folder, prompts, tmp_path
):
    settings = GenerateRun(prompts=str(prompts), out=str(tmp_path / "out"), stop_tokens=("ab",))
    with pytest.raises(ConfigError, match="^--stop_tokens: 'ab' is 2 tokens"):
        require_valid(str(folder), settings, 1)
    with pytest.raises(ConfigError, match="^MODEL_DIR: .* holds no tokenizer"):
        require_valid(str(without_tokenizer(folder, tmp_path / "copy")), settings, 1)


def test_what_one_rank_lacks_is_told_before_the_ranks_join(folder, prompts, tmp_path):
    shutil.copytree(folder, tmp_path / "0" / "model")
    without_tokenizer(folder, tmp_path / "1" / "model")
    code = f"import os; os.chdir('{tmp_path}/' + os.environ['RANK']); from megarlhf import cli; cli.run()"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    words = ["generate", "model", "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        [*launcher, sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120
    )
    told = re.findall("^megarlhf: error.*", result.stderr, re.MULTILINE)
    assert len(told) == 1 and re.search("rank 1 on .*: MODEL_DIR: .*/1/model holds no tokenizer", told[0])


def test_missing_arguments_are_named():
    with pytest.raises(ConfigError, match="MODEL_DIR(.|\n)*--prompts(.|\n)*--out"):
        main([])
    with pytest.raises(ConfigError, match="temperature"):
        main(["folder", "--temprature", "1"])


def test_a_prompt_beyond_the_models_context_is_an_error(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 120}))
    with pytest.raises(DataError, match="row 0: 120 tokens"):
        run_here(folder, GenerateRun(prompts=str(path), out=str(tmp_path / "out"), max_new_tokens=9))
    assert not (tmp_path / "out").exists()


def test_the_command_line_runs_it(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    words = [
        "generate",
        str(folder),
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--temperature",
        "0",
        "--max_new_tokens",
        "4",
    ]
    result = subprocess.run([sys.executable, "-m", "megarlhf", *words], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "3 responses" in result.stdout and len(read(out)) == 3
    assert cli.main(["generate", str(folder), "--prompts", str(prompts), "--out", str(out), "--tp", "2"]) == 2
