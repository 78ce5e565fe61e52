"""Finding and calling reward functions: what is accepted, and what every wrong one is told."""

import functools
import sys
import time

import pytest
import torch

from megarlhf.errors import ConfigError, RewardError
from megarlhf.rewards.functions import BUILTIN, call_reward, resolve

PROMPTS, RESPONSES = ["p", "q", "r"], ["one", "one two", ""]
METADATA = [{"id": "a"}, {"id": "b"}, {"id": "c"}]


def score(function, timeout_s=5.0):
    return call_reward(function, PROMPTS, RESPONSES, METADATA, timeout_s)


def test_a_function_sees_texts_and_metadata_and_gives_float32():
    def function(prompts, responses, metadata):
        return [len(p) + 10 * len(r) + (m["id"] == "b") for p, r, m in zip(prompts, responses, metadata, strict=True)]

    result = score(function)
    assert result.dtype == torch.float32
    assert result.tolist() == [31.0, 72.0, 1.0]


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, 2],
        [True, False, 2],
        (1.0, 0.0, 2.0),
        torch.tensor([1, 0, 2], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.float16).numpy(),
        [torch.tensor(1.0), torch.tensor(0), 2],
    ],
)
def test_every_kind_of_number_is_promoted(result):
    assert score(lambda p, r, m: result).tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        ([1.0, 2.0], "returned 2 values for 3 responses"),
        ([], "returned 0 values for 3 responses"),
        (None, "returned None; return a list of 3 numbers"),
        (1.0, "returned a float"),
        ("abc", "returned a str"),
        (torch.tensor(1.0), "returned a Tensor"),
        (["1", "2", "3"], "returned a str for sample 'a'"),
        ([1.0, None, 2.0], "returned None for sample 'b'"),
        ([1.0, 2.0, float("nan")], "returned nan for sample 'c'"),
        ([1.0, float("inf"), 2.0], "returned inf for sample 'b'"),
        ({"scores": [1, 2, 3]}, r"returned a dict with keys \['scores'\]"),
        ([{"value": 1}] * 3, r"returned a dict with keys \['value'\] for sample 'a'"),
        (torch.ones(3, 1), "returned a list for sample 'a'"),
    ],
)
def test_anything_but_one_finite_number_per_response_is_refused(result, complaint):
    with pytest.raises(RewardError, match=complaint):
        score(lambda p, r, m: result)


def broken(prompts, responses, metadata):
    return [1 / len(response) for response in responses]


def test_what_a_function_raises_comes_with_traceback_and_samples():
    with pytest.raises(RewardError) as caught:
        score(broken)
    text = str(caught.value)
    assert "broken raised ZeroDivisionError (samples 'a', 'b', 'c')" in text
    assert "return [1 / len(response) for response in responses]" in text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Judge:
    def __call__(self, prompts, responses, metadata):
        return self.verdicts[:1] if hasattr(self, "verdicts") else [1.0] * len(responses)


def test_an_object_that_is_called_and_a_partial_function_are_functions_too():
    assert score(Judge()).tolist() == [1.0] * 3
    assert score(functools.partial(lambda bonus, p, r, m: [bonus] * len(r), 2.0)).tolist() == [2.0] * 3
    few = Judge()
    few.verdicts = [1.0]
    with pytest.raises(RewardError, match=":Judge returned 1 values for 3 responses"):
        score(few)


def test_a_function_that_exits_is_an_error_too():
    with pytest.raises(RewardError, match="raised SystemExit"):
        score(lambda p, r, m: sys.exit(3))


def test_a_hanging_function_is_left_after_the_limit():
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"did not return within reward.timeout_s 0.2 s \(samples 'a'"):
        score(lambda p, r, m: time.sleep(3), timeout_s=0.2)
    assert time.monotonic() - start < 2


def test_many_samples_are_named_by_the_first_few():
    ids = [{"id": i} for i in range(20)]
    with pytest.raises(RewardError, match="samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"):
        call_reward(broken, ["p"] * 20, [""] * 20, ids, 5.0)


def test_builtins_and_plug_ins_are_found(tmp_path, monkeypatch):
    assert resolve("length") is BUILTIN["length"]
    (tmp_path / "my_rewards_for_test.py").write_text("def ones(p, r, m):\n    return [1.0] * len(r)\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert score(resolve("my_rewards_for_test:ones")).tolist() == [1.0, 1.0, 1.0]


def test_a_missing_package_is_noticed_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    with pytest.raises(ConfigError, match="reward.functions: sentiment needs .* run: pip install vaderSentiment"):
        resolve("sentiment")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("sentimant", "no reward function is called 'sentimant'; did you mean sentiment"),
        ("length,sentiment", "'length,sentiment' is one word; give several as length sentiment,"),
        ("[length, sentiment]", "is one word; give several as length sentiment,"),
        ("mine:f,mine:g", "is one word; give several as mine:f mine:g,"),
        ("no_such_module:f", "importing 'no_such_module' raised ModuleNotFoundError"),
        ("json:no_such_function", "json has no function called 'no_such_function'"),
        ("math:pi", "math has no function called 'pi'"),
    ],
)
def test_a_function_that_cannot_be_found_is_a_settings_error(spec, complaint):
    with pytest.raises(ConfigError, match=f"reward.functions: .*{complaint}"):
        resolve(spec)


@pytest.mark.parametrize(
    "written",
    ["f(completions, **kwargs)", "f(prompts, responses)", "f(*, prompts, responses, metadata)", "f(a, b, c, d)"],
)
def test_a_function_of_other_arguments_is_a_settings_error(written, tmp_path, monkeypatch):
    (tmp_path / "others_for_test.py").write_text(f"def {written}:\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "others_for_test", raising=False)
    with pytest.raises(ConfigError, match=r"others_for_test:f': takes .* called as f\(prompts, responses, metadata\)"):
        resolve("others_for_test:f")


def test_functions_that_take_more_if_asked_or_do_not_say_are_accepted(tmp_path, monkeypatch):
    (tmp_path / "wider_for_test.py").write_text("def f(*args, scale=1.0, **kwargs):\n    return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert callable(resolve("wider_for_test:f")) and callable(resolve("builtins:max"))


def test_a_module_that_ends_the_process_does_not_end_ours(tmp_path, monkeypatch):
    (tmp_path / "script_for_test.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing 'script_for_test' raised SystemExit"):
        resolve("script_for_test:f")


def test_no_limit_is_too_long():
    assert score(lambda p, r, m: [1.0] * len(r), timeout_s=1e18).tolist() == [1.0, 1.0, 1.0]


def test_a_function_cannot_change_the_metadata_of_the_prompts():
    rows = [{"id": "a"}]
    call_reward(lambda p, r, m: [m[0].pop("id") and 1.0], ["p"], ["r"], rows, 5.0)
    assert rows == [{"id": "a"}]
