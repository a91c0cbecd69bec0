"""The main example runs, proves what it promises, and says so."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from scripts import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"
PROVED = {
    "cross-entropy",
    "weighted cross-entropy",
    "weighted CE + SmoothAP",
    "focal",
    "SmoothAP, queue",
    "RecallAtQuantile, queue",
    "PAUCAtBudget, queue",
    "hard-negative CE, queue",
}
# label, fullrank, detached gather, no gather
PROOF_LINE = re.compile(r"^  (\S.*?\S) +(\d\.\de[+-]\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.MULTILINE)
# metric, loss, difference, width of the interval
VERDICT_LINE = re.compile(r"^  (AP|recall|pAUC) +(\S.*?\S) +([+-]\d\.\d+) \+- (\d\.\d+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished demo on two processes, and where its figure is."""
    folder = tmp_path_factory.mktemp("demo")
    output = folder / "figures" / "demo.png"
    done = run_script(SCRIPT, "--seeds", 2, "--steps", 8, "--output", output, cwd=folder, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, output


@pytest.fixture(scope="module")
def demo_script():
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield importlib.import_module("train_ddp")


def test_the_gradients_are_those_of_one_process(demo):
    proofs = {label: (float(ours), float(detached)) for label, ours, detached, _ in PROOF_LINE.findall(demo[0].stdout)}
    assert set(proofs) == PROVED
    for label, (ours, detached) in proofs.items():
        assert ours <= 1e-12, label
        # The control: half of the gradient is missing.
        assert detached > 0.1, label
    assert "The promise is at most 1e-12: kept." in demo[0].stdout


def test_the_metrics_agree_with_scikit_learn(demo):
    (difference,) = re.findall(r"largest difference (\S+), they agree", demo[0].stdout)
    assert float(difference) <= 1e-6


def test_every_other_loss_is_compared_with_cross_entropy(demo, demo_script):
    found = {(metric, label) for metric, label, _, _ in VERDICT_LINE.findall(demo[0].stdout)}
    others = [style.label for name, style in demo_script.STYLES.items() if name != "cross_entropy"]
    assert found == {(metric, label) for metric in ("AP", "recall", "pAUC") for label in others}


def test_the_output_is_free_of_clutter(demo):
    done, output = demo
    assert "warning" not in done.stderr.lower()
    assert f"Figure: {output}" in done.stdout
    # A log is no terminal: one line for each loss, nothing redrawn.
    assert "\r" not in done.stdout
    assert (done.stdout + done.stderr).isascii()


def test_the_figure_is_a_png(demo):
    assert demo[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_train_and_test_rows_are_those_of_the_set(demo_script):
    train, test = demo_script.make_rows("H", 0)
    assert len(train.targets) + len(test.targets) == 20_000
    assert int(train.targets.sum() + test.targets.sum()) == 734
    assert float(train.features.mean(dim=0).abs().max()) < 1e-5  # standardized by the training rows
    other = demo_script.make_rows("H", 1)[0]
    assert not torch.equal(other.targets, train.targets)  # another seed draws other rows
    with pytest.raises(SystemExit, match="expected a letter from A to Z"):
        demo_script.make_rows("?", 0)


def test_the_recipe_is_the_sum_of_its_two_losses(demo_script):
    """What the docstring says to copy: weighted cross-entropy, divided by the sum of the weights, plus Smooth-AP."""
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(40, 1, generator=generator), (torch.arange(40) % 10 == 0).long()
    weights = torch.where(targets == 1, 0.9, 0.1)
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], targets.float(), reduction="none")
    weighted = (each * weights).sum() / weights.sum()
    ranking = demo_script.SmoothAPLoss(num_classes=1, queue_size=0)(logits, targets)
    recipe = demo_script.WeightedPlusRanking(0.1)(logits, targets)
    torch.testing.assert_close(recipe, weighted + ranking, rtol=1e-6, atol=0)
    assert abs(float(recipe - weighted)) > 1e-3


def test_help_names_every_option(demo_script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as stop:
        demo_script.main()
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("losses", "seeds", "steps", "batch-size", "lr", "letter", "budget", "queue-size", "output"):
        assert f"--{option}" in text
    for name in demo_script.STYLES:
        assert name in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--budget", 0), ("--budget", 1.5), ("--seeds", 0), ("--batch-size", 1), ("--queue-size", -1)],
)
def test_a_bad_option_is_named(demo_script, monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), f"{option}={value}"])
    with pytest.raises(SystemExit) as stop:
        demo_script.main()
    assert stop.value.code == 2
    assert f"error: {option}: expected " in capsys.readouterr().err


def test_one_process_needs_no_torchrun(tmp_path):
    output = tmp_path / "demo.png"
    done = run_script(SCRIPT, "--seeds", 1, "--steps", 4, "--losses", "sum", "--output", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the proof is trivial" in done.stdout
    assert output.is_file()
