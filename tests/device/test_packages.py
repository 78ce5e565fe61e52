"""What is installed, and what only looks so."""

from megarlhf.device.packages import can_import


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "weights_that_bias").mkdir()
    assert not can_import("weights_that_bias") and not can_import("nowhere_at_all")
    (tmp_path / "weights_that_bias" / "__init__.py").write_text("1 / 0")
    assert can_import("weights_that_bias") and can_import("torch") and can_import("zlib")
