"""Under DDP and FSDP2 every rank acts alike, though each sees other batches."""

from pathlib import Path

from tests.watching.single_process import run_ranks


def test_remedies_leave_the_same_weights_on_both_ranks(tmp_path: Path) -> None:
    first, second = run_ranks("tests.remedies.two_ranks", tmp_path, ranks=2)
    assert first == second
    for kind, found in first.items():
        names = found["weights"].keys()
        assert any("qk_norm_q" in name for name in names), kind
        assert any("sigma_reparam" in name for name in names), kind
        assert not any("qk_norm" in name or "sigma" in name for name in found["left"])
        assert found["clipped"] > 0
