"""The preflight passes between two hosts over a slow cable that loses packets."""

import pytest
from two_hosts import Cable, missing_right, run_on_two_hosts

pytestmark = pytest.mark.slow


def test_preflight_between_two_hosts():
    reason = missing_right()
    if reason is not None:
        pytest.skip(reason)
    outcome = run_on_two_hosts(["-m", "fullrank", "--device", "cpu"], Cable(delay=0.002, loss=0.01), timeout=240)
    for process in outcome.processes:
        assert process.returncode == 0, process.stdout + process.stderr
    report = outcome.processes[0].stdout
    assert "18 checks: 18 passed." in report
    assert " hosts " in report
    assert report.split(" hosts ")[1].split()[0] == "2"
    # The cable was there, and it was bad.
    assert outcome.passed > 1000
    assert outcome.lost > 0
