"""Reading, splitting and batching of the example's text."""

import numpy as np
import pytest


@pytest.fixture(scope="session")
def text(example):
    return example("text")


def test_split_is_disjoint_complete_and_in_any_order_the_same(text):
    names = [f"folder/file{number}.py" for number in range(1000)]
    train, held_out = text.split(names)
    assert sorted(train + held_out) == sorted(names)
    assert not set(train) & set(held_out)
    assert text.split(names[::-1]) == (train, held_out)
    assert 0.5 < len(held_out) / len(names) / text.HELD_OUT_SHARE < 1.5


def test_a_file_stays_on_its_side_when_files_are_added(text):
    names = [f"file{number}.py" for number in range(400)]
    _, few = text.split(names[:200])
    _, many = text.split(names)
    assert set(few) == set(many) & set(names[:200])


def test_of_two_files_one_is_held_out(text):
    train, held_out = text.split(["a.txt", "b.txt"])
    assert sorted(train + held_out) == ["a.txt", "b.txt"]
    assert len(held_out) == 1


def test_standard_library_is_split_by_file(text):
    names = text.standard_library()
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or name.startswith(("test/", "encodings/"))]


def test_corpus_of_a_folder_skips_what_is_no_text(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_bytes(b"three")
    (tmp_path / "image").write_bytes(b"\x89\x00\x01")
    (tmp_path / ".hidden").write_bytes(b"no")
    corpus = text.read_corpus(tmp_path)
    assert sorted(corpus.train_files + corpus.held_out_files) == ["a.txt", "deep/b.txt"]
    assert {bytes(corpus.train), bytes(corpus.held_out)} == {b"\0one\ntwo\n\0", b"\0three\0"}


def test_corpus_of_one_file_holds_its_end_out(text, tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 201)))
    corpus = text.read_corpus(path)
    assert bytes(corpus.train)[1:-1] + bytes(corpus.held_out)[1:-1] == path.read_bytes()
    assert len(corpus.held_out) == 2 + 10


def test_no_text_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder"):
        text.read_corpus(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no text in .*: 0 files"):
        text.read_corpus(tmp_path)


def test_batches_depend_on_seed_and_step_only(text):
    tokens = np.arange(5000, dtype=np.int64).astype(np.uint8)
    first, again = (text.TrainingBatches(tokens, rows=8, length=16, seed=3) for _ in range(2))
    later = first.batch(60)["tokens"]  # an epoch has 311 rows, so this is beyond the first
    for step in range(3):
        np.testing.assert_array_equal(first.batch(step)["tokens"], again.batch(step)["tokens"])
    np.testing.assert_array_equal(later, again.batch(60)["tokens"])
    other = text.TrainingBatches(tokens, rows=8, length=16, seed=4)
    assert (other.batch(0)["tokens"] != first.batch(0)["tokens"]).any()
    assert later.shape == (8, 17)
    assert later.dtype == np.int32


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_an_epoch_predicts_every_byte_of_its_rows_once(text, rows):
    length = 10
    tokens = np.arange(2000)  # not bytes: each names its own place
    batches = text.TrainingBatches(tokens, rows=rows, length=length)
    steps = -(-2 * batches.rows_per_epoch // rows)
    rows_of_two_epochs = np.concatenate([batches.batch(step)["tokens"] for step in range(steps)])
    for epoch in range(2):
        drawn = rows_of_two_epochs[epoch * batches.rows_per_epoch :][: batches.rows_per_epoch]
        assert (np.diff(drawn, axis=1) == 1).all()
        predicted = np.sort(drawn[:, 1:].ravel())
        assert (np.diff(predicted) == 1).all()
        assert len(predicted) > len(tokens) - 3 * length


def test_processes_take_rows_of_the_same_batches(text):
    tokens = np.arange(1000) % 251
    batches = text.TrainingBatches(tokens, rows=8, length=10)
    chosen = np.array([2, 3, 7])
    np.testing.assert_array_equal(batches.batch(30, chosen)["tokens"], batches.batch(30)["tokens"][chosen])
    whole = list(text.held_out_batches(tokens, rows=8, length=10))
    part = list(text.held_out_batches(tokens, rows=8, length=10, chosen=chosen))
    assert len(part) == len(whole)
    for ours, theirs in zip(part, whole, strict=True):
        for name in ("tokens", "weights"):
            np.testing.assert_array_equal(ours[name], theirs[name][chosen])


def test_too_little_text_for_a_row_is_refused(text):
    with pytest.raises(ValueError, match=r"has 20 bytes, rows of 10 need at least 21"):
        text.TrainingBatches(np.zeros(20, np.uint8), rows=1, length=10)
    assert text.TrainingBatches(np.zeros(21, np.uint8), rows=1, length=10).rows_per_epoch == 1


@pytest.mark.parametrize("size", [2, 100, 161, 162, 1000])
def test_held_out_batches_predict_every_byte_but_the_first_once(text, size):
    tokens = np.arange(size) % 251
    batches = list(text.held_out_batches(tokens, rows=8, length=20))
    assert {(batch["tokens"].shape, batch["weights"].shape) for batch in batches} == {((8, 21), (8, 20))}
    predicted = np.concatenate([batch["tokens"][:, 1:][batch["weights"] == 1] for batch in batches])
    np.testing.assert_array_equal(predicted, tokens[1:])
