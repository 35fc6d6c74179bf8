"""Every causal LM architecture that transformers can build from a config, packed: exact, or refused before step 1."""

import json
import sys

import pytest
from launching import TESTS, run

pytestmark = pytest.mark.slow


def test_no_architecture_leaks_with_our_operations(tmp_path):
    run([sys.executable, TESTS.parent / "benchmarks" / "audit.py", "--out", tmp_path], timeout=900)
    cells = json.loads((tmp_path / "audit.json").read_text())["cells"]
    statuses = {
        operations: [cell["status"] for cell in cells if cell["operations"] == operations]
        for operations in ("stock", "ours")
    }
    assert len({cell["model_type"] for cell in cells}) > 150
    assert set(statuses["ours"]) <= {"exact", "refused", "-"}
    assert statuses["ours"].count("exact") > statuses["stock"].count("exact")
    assert "leaking" in statuses["stock"]
