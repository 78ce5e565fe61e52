"""YAML and flags become settings, or one list that says everything that is wrong."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.config.fields import dotted_names, settings_of
from megarlhf.config.layout import Layout
from megarlhf.config.load import files_and_flags, load, load_command, load_leniently, to_yaml
from megarlhf.config.settings import PPO, Actor, Optimizer, PPORun, Reward, Run
from megarlhf.errors import ConfigError


@pytest.fixture
def recipe(tmp_path):
    """A function that writes a YAML text and gives its path."""

    def write(text: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def violations(path, *flags) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(PPORun, path, flags)
    return caught.value.violations


def test_an_empty_file_gives_the_defaults(recipe):
    assert load(PPORun, recipe(""), []) == load(PPORun, None, []) == PPORun()


def test_sections_are_merged_over_the_defaults_not_replaced(recipe):
    loaded = load(PPORun, recipe("critic:\n  optimizer:\n    clip_grad: 2\n"), [])
    assert loaded.critic.optimizer == replace(PPORun().critic.optimizer, clip_grad=2.0)
    assert loaded.critic.optimizer.learning_rate == 5e-6


def test_an_empty_section_is_the_default(recipe):
    assert load(PPORun, recipe("critic:\n"), []) == PPORun()


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "1.0e-5", "0.00001", "1E-5"])
def test_scientific_notation_is_a_number_however_yaml_reads_it(recipe, text):
    loaded = load(PPORun, recipe(f"actor:\n  optimizer:\n    learning_rate: {text}\n"), [])
    assert loaded.actor.optimizer.learning_rate == 1e-5


def test_whole_numbers_serve_as_floats(recipe):
    gamma = load(PPORun, recipe("algorithm: {gamma: 1}"), []).algorithm.gamma
    assert gamma == 1.0 and type(gamma) is float


def test_lists_become_tuples(recipe):
    loaded = load(PPORun, recipe("reward:\n  functions: [length, 'mine:score']\n  weights: [1, '5e-1']\n"), [])
    assert loaded.reward == Reward(functions=("length", "mine:score"), weights=(1.0, 0.5))


def test_lambda_is_spelled_lambda(recipe):
    path = recipe("algorithm: {lambda: 0.9}")
    assert load(PPORun, path, []).algorithm == PPO(lambda_=0.9)
    assert load(PPORun, path, ["--algorithm.lambda", "0.8"]).algorithm == PPO(lambda_=0.8)
    assert "lambda: 0.9" in to_yaml(load(PPORun, path, []))


def test_an_unknown_key_gives_its_line_and_the_closest_match(recipe):
    (found,) = violations(recipe("run:\n  steps: 2\nactor:\n  optimizer:\n    learnig_rate: 1\n"))
    assert found.endswith("recipe.yaml:5: actor.optimizer.learnig_rate: no such setting; "
                          "did you mean actor.optimizer.learning_rate?")  # fmt: skip


def test_a_key_in_the_wrong_section_is_found_where_it_belongs(recipe):
    (found,) = violations(recipe("actor:\n  learning_rate: 1e-6\n"))
    assert "did you mean actor.optimizer.learning_rate?" in found
    (found,) = violations(recipe("temperature: 0.5\n"))
    assert "did you mean rollout.temperature?" in found


def test_a_key_like_nothing_lists_what_is_accepted(recipe):
    (found,) = violations(recipe("run:\n  qqqq: 1\n"))
    assert all(name in found for name in ("dir", "seed", "steps"))


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("run: {steps: ten}", "a whole number", "text 'ten'"),
        ("run: {steps: 1.5}", "a whole number", "number 1.5"),
        ("run: {steps: '1e3'}", "a whole number", "write 1000"),
        ("run: {steps: true}", "a whole number", "true/false True"),
        ("run: {steps: null}", "a whole number", "null"),
        ("run: {dir: 2024}", "a text", "put it in quotes"),
        ("run: {overwrite: 1}", "true or false", "whole number 1"),
        ("run: 3", "a section with dir, seed", "whole number 3"),
        ("actor: {train: 2}", "a section with tp, pp", "whole number 2"),
        ("actor: {dtype: float16}", "one of float32, bfloat16", "text 'float16'"),
        ("algorithm: {gamma: true}", "a number", "true/false True"),
        ("algorithm: {gamma: .nan}", "a number", "not finite"),
        ("algorithm: {gamma: much}", "a number", "text 'much'"),
        ("algorithm: {gamma: {a: 1}}", "a number", "a section"),
        ("reward: {functions: length}", "a list of texts", "write [length]"),
        ("reward: {functions: [1]}", "a list of texts", "whole number 1"),
    ],
)
def test_a_wrong_type_says_what_is_expected_and_what_was_found(recipe, text, expected, found):
    (sentence,) = violations(recipe(text))
    assert "recipe.yaml:1: " in sentence and f"expected {expected}" in sentence and found in sentence


def test_a_duplicate_key_names_both_lines(recipe):
    (found,) = violations(recipe("run:\n  steps: 1\n  seed: 3\n  steps: 2\n"))
    assert "recipe.yaml:4: steps: given twice, first in line 2" in found


def test_a_syntax_error_gives_file_and_line(recipe):
    (found,) = violations(recipe("run:\n  steps: 1\n\tseed: 3\n"))
    assert "recipe.yaml:3: not valid YAML" in found
    (found,) = violations(recipe("run: {steps: 1\nactor: {}\n"))
    assert "recipe.yaml:2: not valid YAML" in found


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("run:\n    steps: 1\n  seed: 3\n", 3, "give all keys of a section the same indentation"),
        ("run:\n  steps: 1\n   seed: 3\n", 3, "indent the line as those above it"),
        ("run:\n  dir: a\n  steps:1\n  seed: 3\n", 4, "with a blank after the colon"),
        ("run:\n\tsteps: 1\n", 2, "indent with blanks, not with tabs"),
    ],
)
def test_a_slip_of_indentation_is_called_by_its_name(recipe, text, line, hint):
    (found,) = violations(recipe(text))
    assert f"recipe.yaml:{line}: not valid YAML" in found and hint in found


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(recipe, text):
    assert "expected sections such as `actor:`" in violations(recipe(text))[0]


def test_a_missing_file_is_named():
    assert "nowhere.yaml: cannot be read: No such file" in violations("nowhere.yaml")[0]


def test_later_files_are_laid_over_earlier_ones_key_by_key(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yml"
    first.write_text("run: {steps: 7, seed: 3}\nactor: {train: {tp: 2}}\n")
    second.write_text("run: {steps: 8}\nactor: {train: {sp: true}}\n")
    found = load_command(PPORun, [str(first), str(second), "--run.seed", "4"], "megarlhf ppo")
    assert (found.run.steps, found.run.seed) == (8, 4) and found.actor.train == Layout(tp=2, sp=True)
    second.write_text("run: {stepz: 8}\n")
    with pytest.raises(ConfigError, match=r"second\.yml:1: run\.stepz: no such setting"):
        load(PPORun, [first, second], [])


def test_all_violations_of_file_and_flags_come_in_one_error(recipe):
    path = recipe("run:\n  steps: ten\n  seeed: 1\nactor:\n  dtype: int8\n  dtype: int4\n")
    found = violations(path, "--algorithm.gamma", "big", "--rollout.top_kk", "3")
    assert len(found) == 6


def test_flags_win_over_the_file_and_the_file_over_defaults(recipe):
    path = recipe("run: {steps: 7, seed: 5}\n")
    assert load(PPORun, path, ["--run.steps", "9"]).run == Run(steps=9, seed=5)


def test_flags_of_every_kind():
    flags = "--actor.optimizer.learning_rate 1e-6 --actor.train.sp --run.tensorboard false --actor.dtype=bfloat16 "
    flags += "--reward.functions length mine:score --reward.weights 1 -2e-1 --critic.train.tp 2 --run.dir 12"
    loaded = load(PPORun, None, flags.split())
    assert loaded.actor == Actor(optimizer=Optimizer(learning_rate=1e-6), train=Layout(sp=True), dtype="bfloat16")
    assert loaded.run == Run(tensorboard=False, dir="12")
    assert loaded.reward == Reward(functions=("length", "mine:score"), weights=(1.0, -0.2))
    assert loaded.critic.train == Layout(tp=2) and loaded.reward.train is None


@pytest.mark.parametrize("typed", [["1.0", "-2e-1"], ["[1.0, -2e-1]"], ["[1.0,-2e-1]"]])
def test_a_list_of_numbers_may_be_several_words_or_one_in_brackets(typed):
    assert load(PPORun, None, ["--reward.weights", *typed]).reward.weights == (1.0, -0.2)


def test_a_text_in_brackets_stays_a_text():
    assert load(PPORun, None, ["--rollout.stop_tokens", "[END]"]).rollout.stop_tokens == ("[END]",)
    assert load(PPORun, None, ["--reward.weights", "[]"]).reward.weights == ()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--reward.weights 1.0,2.0", "found text '1.0,2.0'; put blanks between several, as in 1 2"),
        ("--reward.weights [1.0,a]", "found text 'a'"),
        ("--run.stesp 3", "--run.stesp: no such setting; did you mean run.steps?"),
        ("--run.stesp=3", "--run.stesp: no such setting; did you mean run.steps?"),
        ("--run.steps many", "--run.steps: expected a whole number, found text 'many'"),
        ("--run.steps", "--run.steps: expected a whole number, found nothing"),
        ("--run.steps 3 4", "--run.steps: expected a whole number, found 2 words: 3 4"),
        ("--actr.model m", "did you mean actor.model?"),
        ("--rollout.zzzz 2", "accepted here: batch_size, samples_per_prompt,"),
        ("--actor.train 2", "--actor.train: no such setting"),
        ("stray --run.steps 3", "'stray': expected a flag"),
    ],
)
def test_a_wrong_flag_is_explained(flags, found):
    assert found in violations(None, *flags.split())[0]


def test_the_first_word_of_a_command_is_its_file(recipe):
    path = str(recipe("run: {steps: 7}\n"))
    assert load_command(PPORun, [path, "--run.seed", "2"], "megarlhf ppo").run == Run(steps=7, seed=2)
    assert load_command(PPORun, ["--run.seed", "2"], "megarlhf ppo").run == Run(seed=2)


def test_help_shows_each_setting_with_its_sentence_and_value(recipe, capsys):
    with pytest.raises(SystemExit) as leave:
        load(PPORun, recipe("run: {steps: 1234}\n"), ["--help"], "megarlhf ppo")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert leave.value.code == 0
    assert all(f"--{name} " in shown for name in dotted_names(PPORun) if name.rpartition(".")[2] in ("steps", "lambda"))
    assert "--actor.optimizer.learning_rate FLOAT Peak learning rate. (now: 1e-06)" in shown
    assert "(now: 1234)" in shown


def strategy(setting):
    """Any value of a setting's type, including texts that YAML would rather read as something else."""
    odd = ["1e-5", "null", "yes", "", " a", "x: y", "# c", "é\n", "0x1", "~", "- a", "\x85", "a\u2028b", "\u2029"]
    texts = st.sampled_from(odd) | st.text(max_size=8)
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    plain = {bool: st.booleans(), int: st.integers(), float: numbers, str: texts}
    plain |= {tuple[str, ...]: st.lists(texts, max_size=3).map(tuple), tuple[float, ...]: st.lists(numbers).map(tuple)}
    plain |= {tuple[int, ...]: st.lists(st.integers()).map(tuple)}
    kind = plain.get(setting.kind) if not setting.is_section else any_settings(setting.kind)
    kind = st.sampled_from(setting.kind.__args__) if kind is None else kind
    return kind | st.none() if setting.optional else kind


def any_settings(cls):
    return st.builds(cls, **{setting.attribute: strategy(setting) for setting in settings_of(cls)})


@settings(max_examples=8, deadline=None)
@given(any_settings(PPORun))
def test_yaml_round_trips_exactly(tmp_path_factory, chosen):
    path = tmp_path_factory.mktemp("yaml") / "settings.yaml"
    path.write_text(to_yaml(chosen), encoding="utf-8")
    assert load(PPORun, path, []) == chosen


def test_lenient_reading_keeps_what_can_be_used():
    files, flags = files_and_flags(["recipe.yaml", "--run.steps", "5"])
    assert files == ("recipe.yaml",) and files_and_flags(flags) == ((), flags)
    found, told = load_leniently(PPORun, None, ["--run.dir", "here", "--run.stepz", "5", "--run.steps", "many"])
    assert found.run.dir == "here" and found.run.steps == PPORun().run.steps
    assert len(told) == 2


@pytest.mark.parametrize("text", ["run:\n  dir: 2024-99-99\n", "run: " + "[" * 2000, f"run: {{seed: {'9' * 5000}}}"])
def test_what_the_yaml_package_trips_over_is_a_settings_error(recipe, text):
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not valid YAML: "):
        load(PPORun, recipe(text), [])
