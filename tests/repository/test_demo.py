"""The main example runs, proves what it promises, and says so."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
LABELS = {"cross-entropy", "focal", "SmoothAP", "RecallAtQuantile", "PAUCAtBudget"}
# label, fullrank, detached gather, no gather
PROOF_LINE = re.compile(r"^  (\S+) +(\d\.\de[+-]\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished demo on two processes, and where its figure is."""
    folder = tmp_path_factory.mktemp("demo")
    output = folder / "figures" / "demo.png"
    done = run_script(SCRIPT, "--seeds", 1, "--steps", 8, "--output", output, cwd=folder, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, output


def test_the_gradients_are_those_of_one_process(demo):
    proofs = {label: (float(ours), float(detached)) for label, ours, detached, _ in PROOF_LINE.findall(demo[0].stdout)}
    assert set(proofs) == LABELS
    for label, (ours, detached) in proofs.items():
        assert ours <= 1e-12, label
        # The control: half of the gradient is missing.
        assert detached > 0.1, label


def test_the_metrics_agree_with_scikit_learn(demo):
    (difference,) = re.findall(r"largest difference (\S+), they agree", demo[0].stdout)
    assert float(difference) <= 1e-6


def test_the_output_is_free_of_clutter(demo):
    done, output = demo
    assert "warning" not in done.stderr.lower()
    assert f"Figure: {output}" in done.stdout
    # A log is no terminal: one line for each loss, nothing redrawn.
    assert "\r" not in done.stdout
    assert (done.stdout + done.stderr).isascii()


def test_the_figure_is_a_png(demo):
    assert demo[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture(scope="module")
def demo_script():
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("train_ddp")


def test_help_names_every_option(demo_script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as stop:
        demo_script.main()
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--losses", "--seeds", "--steps", "--batch-size", "--digit", "--positive-rate", "--output"):
        assert option in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--main-weight", 0), ("--main-weight", 1.5), ("--quantile", 1), ("--beta", 0), ("--queue-size", -1)],
)
def test_a_bad_option_is_named(demo_script, monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"{option}={value}"])
    with pytest.raises(SystemExit) as stop:
        demo_script.main()
    assert stop.value.code == 2
    assert f"error: {option}: expected " in capsys.readouterr().err


def test_one_process_needs_no_torchrun(tmp_path):
    output = tmp_path / "demo.png"
    done = run_script(SCRIPT, "--seeds", 1, "--steps", 4, "--losses", "smooth_ap", "--output", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the proof is trivial" in done.stdout
    assert output.is_file()
