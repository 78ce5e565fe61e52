"""Whatever is in a recipe, it is read or refused in our own words."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.config.check import violations
from megarlhf.config.fields import dotted_names
from megarlhf.config.load import load_leniently, to_yaml
from megarlhf.config.settings import PPORun
from megarlhf.errors import ConfigError

NAMES = list(dotted_names(PPORun))
words = st.sampled_from(
    ["true", "null", "1e400", "-0", "[]", "{}", "~", "0x10", "1_0", "&a", "*a", "!!python/object:os.system"]
)
lines = st.lists(
    st.text(max_size=30)
    | st.tuples(st.sampled_from([name.rpartition(".")[2] for name in NAMES]), words).map(": ".join),
    max_size=8,
)


@given(lines.map("\n".join) | st.binary(max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_file_is_settings_or_a_list_of_sentences(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        found, wrong = load_leniently(PPORun, path, [])
    except ConfigError as error:
        assert str(path) in str(error)
        return
    assert all(isinstance(sentence, str) and sentence for sentence in wrong)
    violations(found, 2)
    assert to_yaml(found)


@given(st.sampled_from(NAMES), st.text(min_size=1, max_size=12))
@settings(max_examples=6, deadline=None)
def test_any_value_of_any_flag_is_taken_or_refused_by_name(name, value):
    try:
        found, wrong = load_leniently(PPORun, None, [f"--{name}={value}"])
    except ConfigError as error:
        wrong = list(error.violations)
    else:
        violations(found, 2)
    assert all("--" in sentence or name in sentence for sentence in wrong)
