"""`megarlhf plan` and `--dry-run`: the recipes fit, what does not fit says why, and settings that are wrong say so."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.cli import main
from megarlhf.config.check import recipes_of
from megarlhf.config.command import command_of
from megarlhf.config.layout import Layout
from megarlhf.config.load import load
from megarlhf.config.precision import FP8
from megarlhf.config.settings import Actor, PPORun
from megarlhf.device.transformer_engine import Machine, missing_for_te
from megarlhf.loop.planner.command import Options, question_of
from megarlhf.loop.planner.gpus import GPUS, gpu_named, gpu_violations
from megarlhf.loop.planner.models import COUNTED_FAMILIES, uncounted
from megarlhf.loop.planner.plan import make_plan
from megarlhf.loop.planner.report import advice
from megarlhf.models.families import FAMILIES
from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS, Tenant
from tests.loop.planner.measured import planned
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[3]


def test_the_plan_of_70b_on_64_ranks_takes_less_than_ten_seconds_of_processor_time_and_no_torch():
    code = (
        "import sys, time; from megarlhf.cli import main; "
        "code = main(['plan', 'examples/recipes/llama3.1_70b/ppo.yaml', '--ranks', '64']); "
        "assert 'torch' not in sys.modules; print(code, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    exit_code, seconds = done.stdout.splitlines()[-1].split()
    assert exit_code == "0" and float(seconds) < 10


def test_bytes_of_the_70b_recipe_follow_from_its_number_of_parameters():
    """An independent count: of 70.55e9 parameters over 32 ranks, 2 + 4 bytes each and 12 over dp 2."""
    file = str(ROOT / "examples/recipes/llama3.1_70b/ppo.yaml")
    plan = make_plan(question_of("ppo", load(PPORun, file, []), Options({"--ranks": "64"}, frozenset()), file))
    matrices, embedding = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672, 128256 * 8192
    count = 80 * (matrices + 2 * 8192) + 2 * embedding + 8192
    assert plan.exports["actor"] == 2 * count and plan.states["actor"] == 14 * count
    held = plan.stages[-1].tenants
    # The first of four stages has the embedding and 20 layers; norms are whole on each of 8 tensor ranks.
    share = (20 * matrices + embedding) / 8 + 20 * 2 * 8192
    for part, each in ((WEIGHTS, 2), (GRADIENTS, 4), (OPTIMIZER, 6)):
        assert held[Tenant("actor", part)] == pytest.approx(each * share, rel=1e-6)
    received = [sum(pair) for pair in zip(*plan.reshard.received.values(), strict=True)]
    have = [got + copied for got, copied in zip(received, plan.reshard.copied_bytes, strict=True)]
    assert all(total == held[Tenant("generator", WEIGHTS)] for total in have)


@pytest.fixture
def recipe(tmp_path):
    """A PPO recipe of tiny models that are given as architecture files only."""
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures/tiny.json").write_text(json.dumps({"_source": "made up", **tiny_config()}))
    file = tmp_path / "ppo.yaml"
    file.write_text(
        "actor: {model: models/tiny, train: {pp: 2}}\ncritic: {train: {}}\nreward: {functions: [length]}\n"
        "rollout: {batch_size: 8, max_new_tokens: 16}\ndata: {prompts: none.jsonl, max_prompt_tokens: 16}\n"
        "algorithm: {num_minibatches: 2}\n"
    )
    return file


def test_a_model_may_be_an_architecture_file_beside_the_recipe(recipe, capsys):
    assert main(["plan", str(recipe), "--ranks", "2", "--gpu", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "tiny.json (made up)" in shown and "actor.optimizer" in shown and "Fits" in shown


def test_a_model_may_be_a_folder_with_config_json_only(recipe, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    assert main(["plan", str(recipe), "--actor.model", str(folder)]) == 0
    assert str(folder / "config.json") in capsys.readouterr().out


def test_a_model_that_is_nowhere_is_told_with_the_places_looked_at(recipe, capsys):
    assert main(["plan", str(recipe), "--actor.model", "models/other"]) == 2
    assert "other.json; put the model's config.json at either place (described there: tiny)" in capsys.readouterr().out


def test_an_unknown_family_is_refused_by_name(recipe, capsys):
    file = recipe.parent / "architectures/tiny.json"
    file.write_text(json.dumps({**tiny_config(), "model_type": "mamba"}))
    assert main(["plan", str(recipe)]) == 2
    assert "model_type 'mamba' is not supported" in capsys.readouterr().out


def test_what_is_not_counted_is_said_rather_than_guessed():
    model = planned(Layout(cp=2))
    (line,) = uncounted(model)
    assert line.startswith("actor.train: plan does not count cp 2")
    other = replace(model, layout=Layout(), architecture=replace(model.architecture, family="another"))
    assert "does not count the layers of another models" in uncounted(other)[0]
    assert not uncounted(planned(Layout(tp=2))) and set(COUNTED_FAMILIES) <= set(FAMILIES)


def test_broken_rules_are_listed_together(recipe, capsys):
    flags = ["--actor.train.tp", "3", "--actor.train.pp", "9", "--rollout.max_new_tokens", "200"]
    assert main(["plan", str(recipe), "--ranks", "27", *flags]) == 2
    shown = capsys.readouterr().out
    assert "tp 3 does not divide 4 attention heads" in shown and "more than 4 layers" in shown
    assert "exceed its 128 positions" in shown and re.search(r"Cannot run: \d rules are broken", shown)
    assert main(["plan", str(recipe), "--ranks", "1"]) == 2
    shown = capsys.readouterr().out
    assert "Cannot run: 1 rule is broken." in shown and "megarlhf ppo on 1 rank of " in shown


def test_what_does_not_fit_names_stage_rank_and_remedies(recipe, capsys):
    assert main(["plan", str(recipe), "--ranks", "2", "--gpu", "cpu", "--memory-gib", "0.001"]) == 1
    assert "Does not fit" in capsys.readouterr().out
    file = str(ROOT / "examples/recipes/llama3.1_70b/ppo.yaml")
    plan = make_plan(question_of("ppo", load(PPORun, file, []), Options({"--ranks": "32"}, frozenset()), file))
    worst = max(plan.stages, key=lambda stage: stage.device)
    lines = advice(plan, worst)
    assert not plan.fits and worst.name == "learn_actor"
    assert any("generator: freed" in line for line in lines) and any("recompute: full" in line for line in lines)


def test_recomputation_and_residency_make_room(recipe):
    file = str(ROOT / "examples/recipes/llama3.1_70b/ppo.yaml")
    flags = ["--actor.recompute", "full", "--residency.idle", "host"]
    plans = [
        make_plan(question_of("ppo", load(PPORun, file, words), Options({"--ranks": "64"}, frozenset()), file))
        for words in ([], flags)
    ]
    assert plans[1].peak_bytes < 0.75 * plans[0].peak_bytes and plans[1].host_bytes > plans[0].host_bytes
    assert plans[1].seconds["learn_actor"].likely > 1.2 * plans[0].seconds["learn_actor"].likely


@pytest.mark.parametrize(
    "flags", [["--actor.lora.rank", "4"], ["--reference.url", "http://127.0.0.1:8000"], ["--algorithm.kl_coef", "0"]]
)
def test_a_reference_that_is_not_kept_here_is_not_counted(recipe, flags, capsys):
    stages = []
    for words in ([], flags):
        assert main(["plan", "ppo", str(recipe), "--ranks", "2", "--gpu", "cpu", "--json", *words]) == 0
        stages.append({stage["stage"] for stage in json.loads(capsys.readouterr().out)["stages"]})
    assert stages[0] - stages[1] == {"reference"}


def test_dry_run_plans_in_place_of_a_run(recipe, capsys):
    assert main(["ppo", str(recipe), "--dry-run", "--ranks", "4", "--gpu", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 4 and found["fits"] and {stage["stage"] for stage in found["stages"]} >= {"learn_actor"}
    assert not (recipe.parent / "runs").exists() and not Path("runs/ppo/config.yaml").exists()


def test_the_reshard_is_shown_rank_by_rank_and_validated(recipe, capsys):
    assert main(["plan", str(recipe), "--ranks", "2", "--reshard", "--links"]) == 0
    shown = capsys.readouterr().out
    assert "every element of the target is written exactly once" in shown and "0 -> 1" in shown
    assert main(["plan", str(recipe), "--ranks", "2", "--reshard", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_validated"] and found["largest_bucket_bytes"] <= found["peak_extra_bytes"] <= 2 * 64 * 2**20
    assert sum(size for _, _, size in found["links"]) == found["bytes_moved"]


def test_search_cuts_experts_too(tmp_path, capsys):
    (tmp_path / "architectures").mkdir()
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    config = tiny_config() | mixture | {"num_experts_per_tok": 2}
    (tmp_path / "architectures/tiny.json").write_text(json.dumps(config))
    file = tmp_path / "sft.yaml"
    file.write_text("actor: {model: models/tiny, train: {ep: 4}}\ndata: {path: data.jsonl, max_tokens: 64}\n")
    assert main(["plan", "sft", str(file), "--ranks", "4", "--search", "--json"]) == 0
    flags = [choice["flags"].split() for choice in json.loads(capsys.readouterr().out)["choices"]]
    found = {words[words.index("--actor.train.ep") + 1] for words in flags}
    assert found >= {"1", "2"}
    assert all(main(["plan", "sft", str(file), "--ranks", "4", *words]) == 0 for words in flags)


def test_search_offers_what_fits_quickest_first(recipe, capsys):
    assert main(["plan", str(recipe), "--ranks", "4", "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [choice["seconds"]["likely"] for choice in found["choices"]]
    assert len(seconds) > 3 and seconds == sorted(seconds)
    assert main(["plan", str(recipe), "--ranks", "4", *found["choices"][0]["flags"].split()]) == 0


def test_the_command_is_found_by_the_settings_it_takes():
    assert command_of([str(ROOT / "examples/recipes/llama3.1_70b/ppo.yaml")], "plan") == "ppo"


@pytest.mark.parametrize(("name", "likely"), [("some", "ppo"), ("grpo", "grpo"), ("my_kto", "kto")])
def test_settings_that_several_commands_take_need_its_name(tmp_path, capsys, name, likely):
    file = tmp_path / f"{name}.yaml"
    file.write_text("actor: {model: m}\n")
    assert main(["plan", str(file)]) == 2
    assert f"say which: megarlhf plan {likely} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--ranks", "two"], "--ranks two: give a number"),
        (["--gpu", "abacus"], "choose one of"),
        (["--ranks"], "--ranks: expected a value"),
        (["--memory-gib", "-1"], "give a number of at least"),
    ],
)
def test_flags_that_make_no_sense_are_named(recipe, words, wanted, capsys):
    assert main(["plan", str(recipe), *words]) == 2
    assert wanted in capsys.readouterr().err


def test_commands_over_data_sets_are_planned_too(tmp_path, capsys):
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures/tiny.json").write_text(json.dumps(tiny_config()))
    file = tmp_path / "dpo.yaml"
    file.write_text("actor: {model: models/tiny}\ndata: {path: data.jsonl, max_tokens: 64}\n")
    for command, stages in (("sft", {"learn_actor"}), ("dpo", {"reference", "learn_actor"})):
        assert main(["plan", command, str(file), "--ranks", "2", "--json"]) == 0
        assert {stage["stage"] for stage in json.loads(capsys.readouterr().out)["stages"]} == stages


def test_every_gpu_says_where_its_numbers_come_from():
    assert all(gpu.source and gpu.memory_gib > 0 and gpu.flops >= gpu.float32_flops for gpu in GPUS.values())
    assert gpu_named("h100").memory_gib == 80


@pytest.mark.parametrize("layers", ["te", "emulated_fp8"])
@pytest.mark.parametrize("recipe", ["off", "tensorwise", "delayed", "blockwise", "mxfp8"])
def test_a_gpu_is_refused_exactly_where_a_launch_on_it_would_be(layers, recipe):
    actor = Actor(model="m", layers=layers, generate_fp8=FP8(recipe))
    for gpu in GPUS.values():
        at_launch = missing_for_te(Machine("2.9", gpu.capability, (13, 0)), "actor", recipes_of(actor, "actor"))
        told = gpu_violations(PPORun(actor=actor), gpu)
        assert bool(told) == bool(at_launch and layers == "te") and all(
            f"--gpu {gpu.name}: actor." in one for one in told
        )


def test_a_gpu_without_the_recipes_numbers_is_told_with_the_others(recipe, capsys):
    flags = ["--actor.layers", "te", "--actor.fp8.recipe", "blockwise"]
    assert main(["plan", str(recipe), "--gpu", "a100", *flags]) == 2
    assert (
        "--gpu a100: actor.fp8.recipe: blockwise needs a GPU of compute capability 9.0 or more, and this one has 8.0; "
        "choose off, or another GPU" in capsys.readouterr().out
    )
    assert main(["plan", str(recipe), "--gpu", "a100", "--search", *flags]) == 2
