"""What the time of a profiled step went to, from traces made by hand."""

from megarlhf.telemetry.costs import Event, costs, markdown, rows, top_costs


def label(name: str, start: float, end: float, own: float = 0.0) -> Event:
    return Event(name, start, end, own, is_label=True)


def call(name: str, start: float, end: float, on_device: bool = False) -> Event:
    return Event(name, start, end, end - start, on_device=on_device)


STEP = [
    label("step", 0, 1_000_000),
    label("stage generate", 100_000, 400_000),
    label("sample", 100_000, 380_000, own=30_000),
    call("aten::mm", 110_000, 360_000),
    label("stage learn_actor", 400_000, 900_000),
    label("pass", 400_000, 880_000),
    label("forward", 410_000, 600_000, own=10_000),
    call("aten::mm", 420_000, 600_000),
    call("c10d::allreduce_", 450_000, 500_000),  # inside the forward pass: part of it
    label("backward", 600_000, 800_000),
    call("aten::mm", 600_000, 790_000),
    call("c10d::allreduce_", 800_000, 840_000),
    label("optimizer", 840_000, 880_000),
    label("reward", 950_000, 960_000),  # no stage and no kind of work
]


def test_every_moment_of_a_stage_counts_once():
    found = {one.name: one for one in costs(STEP)}
    assert list(found) == ["step", "generate", "learn_actor"]
    learn = found["learn_actor"]
    expected = {"forward": 0.19, "backward": 0.2, "communicate": 0.04, "optimizer": 0.04}
    assert {kind: round(taken, 6) for kind, taken in learn.kinds.items()} == expected
    assert round(learn.framework_s, 6) == round(0.5 - 0.47, 6)
    assert round(found["step"].framework_s, 6) == round(1.0 - 0.28 - 0.47, 6)
    assert round(found["generate"].framework_s, 6) == 0.02


def test_the_top_costs_are_sums_over_calls():
    found = {one.name: one for one in costs(STEP)}
    name, taken, calls = found["learn_actor"].top[0]
    assert (name, round(taken, 6), calls) == ("aten::mm", 0.37, 2)
    assert ("Python of sample", 0.03, 1) in [(op, round(taken, 6), calls) for op, taken, calls in found["generate"].top]
    assert top_costs(found["generate"]) == "aten::mm 83% (1 calls), Python of sample 10% (1 calls)"


def test_a_stage_that_comes_twice_is_one():
    again = [label("stage reward", 10_000, 20_000), label("stage reward", 30_000, 50_000)]
    found = {one.name: one for one in costs([label("step", 0, 60_000), *again])}
    assert round(found["reward"].seconds, 6) == 0.03


def test_kernels_of_a_gpu_come_before_what_launched_them():
    found = costs([label("step", 0, 100), call("aten::mm", 0, 90), call("sgemm", 20, 60, on_device=True)])
    assert [name for name, _, _ in found[0].top] == ["sgemm"]


def test_the_files_say_the_same():
    found = costs(STEP)
    assert [row["name"] for row in rows(found)] == ["step", "generate", "learn_actor"]
    table = markdown(found)
    assert "| learn_actor | 0.500 | 38.0% | 40.0% | 8.0% |  | 8.0% | 6.0% |" in table
    assert "- learn_actor: aten::mm 74% (2 calls), c10d::allreduce_ 18% (2 calls)" in table
