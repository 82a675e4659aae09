"""The faults of the mutation test (`make mutate`) fit the code."""

from collections import Counter
from pathlib import Path

import pytest
from harness.planting import CannotPlantError, Fault, with_fault
from mutation import FAULTS, related_tests

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault: Fault) -> None:
    """The old text occurs once, the result is Python, and the tests of the area exist."""
    compile(with_fault(ROOT / fault.file, fault.old, fault.new), fault.file, "exec")
    assert all((ROOT / test).exists() for test in related_tests(fault.file))


def test_a_fault_that_cannot_be_planted_is_an_error(tmp_path: Path) -> None:
    """A missing or repeated text is never skipped silently."""
    (tmp_path / "twice.py").write_text("a = 1\na = 1\n")
    with pytest.raises(CannotPlantError, match="occurs 0 times"):
        with_fault(tmp_path / "missing.py", "a", "b")
    with pytest.raises(CannotPlantError, match="occurs 2 times"):
        with_fault(tmp_path / "twice.py", "a = 1", "a = 2")


def test_faults_cover_adapters_services_and_workers() -> None:
    """More than 100 faults with different names, at least a third of them in these areas."""
    areas = ("client/engines/", "server/services/", "server/rpc/", "server/bulk/", "server/devices/", "cuda/device/")
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    assert len(FAULTS) > 100
    assert sum(fault.file.startswith(areas) for fault in FAULTS) >= len(FAULTS) / 3
