"""What the training run shows."""

import io

import pytest
from rich.console import Console


@pytest.fixture(scope="session")
def report(example):
    return example("report")


def test_progress_without_a_terminal_is_ten_lines(report):
    console = Console(file=io.StringIO(), width=120)
    with report.TrainingProgress(console, steps=25, tokens_per_step=100) as progress:
        for _ in range(25):
            progress.advance(2.5)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step 25 of 25: 2.500 bits per byte, ")
    assert lines[-1].endswith(" tokens/s, 0:00 left")


def test_progress_on_a_terminal_is_a_bar_with_loss_rate_and_time_left(report):
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with report.TrainingProgress(console, steps=3, tokens_per_step=100) as progress:
        for _ in range(3):
            progress.advance(2.5)
    shown = console.file.getvalue()
    assert "2.500 bits per byte" in shown
    assert "tokens/s" in shown
    assert "left" in shown


def test_loss_curve_is_a_png(report, tmp_path):
    path = tmp_path / "loss.png"
    report.save_loss_curve(path, [8.0, 4.0, 3.0], {2: 4.1, 3: 3.2}, {"byte bigram": 3.5, "byte trigram": 2.6})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_result_table_names_every_model(report):
    console = Console(file=io.StringIO(), width=80)
    console.print(report.result_table({"byte bigram": 3.5231, "this model": 1.9}))
    assert "byte bigram" in console.file.getvalue()
    assert "3.523" in console.file.getvalue()
    assert "1.900" in console.file.getvalue()


def test_optimizers_are_compared_with_the_first(report, example, tmp_path):
    outcome = example("compare_optimizers").Outcome
    outcomes = [outcome("adamw", [2.0, 4.0], {1: 5.0, 2: 3.0}, 8.0), outcome("muon", [2.7], {1: 4.0, 2: 2.7}, 4.5)]
    console = Console(file=io.StringIO(), width=100)
    console.print(report.optimizer_table(outcomes))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in console.file.getvalue().splitlines() if "│" in line
    ]
    assert rows == [["adamw", "3.0000", "+0.00%", "8.00"], ["muon", "2.7000", "-10.00%", "4.50"]]
    report.save_optimizer_curves(tmp_path / "optimizers.png", outcomes)
    assert (tmp_path / "optimizers.png").read_bytes().startswith(b"\x89PNG")


def test_progress_of_a_resumed_run_begins_where_it_was(report):
    console = Console(file=io.StringIO(), width=120)
    with report.TrainingProgress(console, steps=20, tokens_per_step=100, done=15) as progress:
        for loss in [2.5, float("nan"), 2.5, 2.5, 2.5]:  # one of them was skipped
            progress.advance(loss)
    lines = console.file.getvalue().splitlines()
    assert lines[-1].startswith("step 20 of 20: 2.500 bits per byte, ")


def test_a_sample_can_be_shown_whatever_its_bytes(report):
    assert report.printable(b"a\tb\n\x1b[31m\x00\xc3\xa9\xff") == "a\tb\n·[31m·é\ufffd"


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (-1, "0:00")])
def test_clock(report, seconds, shown):
    assert report.clock(seconds) == shown
