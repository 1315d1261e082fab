"""A sample of ``python -m benchmarks.mutated_pages``, which does ten thousand."""

from pathlib import Path

from benchmarks.mutated_pages import campaign, outcome, write_run


def test_damaged_files_neither_crash_a_page_nor_run_a_script(tmp_path: Path) -> None:
    found = campaign(tmp_path, 15, seed=5)
    assert set(found) <= {"shown", "refused"} and found["shown"] >= 3


def test_a_sound_file_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "mutated.eqp")
    write_run(tmp_path / "sound.eqp")
    assert outcome(tmp_path) == "shown"
