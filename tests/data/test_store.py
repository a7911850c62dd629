"""The feature store: what goes in comes out, damage is named, and a crash between any two calls of the system loses nothing."""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zendaya
from zendaya.data.features import store
from zendaya.data.features.store import FeatureStore, Signature, StoreWriter, pack
from zendaya.encoders.base import Tokens, Traits
from zendaya.errors import ConfigError, SourceError, StoreError

DIM = 40


def traits(**changes):
    settings = {
        "name": "fake",
        "modality": "features",
        "dim": DIM,
        "tokens_per_s": 3.0,
        "look_back_s": math.inf,
        "look_ahead_s": 0.0,
        "live": True,
    }
    return Traits(**settings | changes)


def signature(dtype="fp32", **changes):
    return Signature.of(traits(), **{"encoder_digest": "e", "corpus": "c", "data_digest": "d", "dtype": dtype} | changes)


def tokens(seed, dim=DIM):
    generator = np.random.default_rng(seed)
    number = 1 + seed % 7
    values = generator.standard_normal((number, dim)).astype(np.float32) * np.exp(generator.standard_normal((1, dim))).astype(np.float32)
    return Tokens(torch.from_numpy(values), np.sort(generator.random(number)))


def write(path, numbers=range(12), dtype="fp32", shard_bytes=2000, finish=True):
    """A store of fake clips, every fifth of which cannot be encoded."""
    with StoreWriter(path, signature(dtype), shard_bytes=shard_bytes) as writer:
        for number in list(numbers)[len(writer.entries) :]:
            split = "train" if number % 2 else "test"
            if number % 5 == 4:
                writer.fail(f"clip{number}", split, "unreadable", f"clip{number}.wav: damaged")
            else:
                made = tokens(number)
                writer.add(f"clip{number}", split, len(made), pack(made, dtype))
        if finish:
            writer.finish()


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture
def made(tmp_path):
    write(tmp_path / "store")
    return tmp_path / "store"


def test_what_goes_in_comes_out(made):
    opened = FeatureStore.open(made, encoder=traits(), corpus="c")
    assert opened.signature == signature()
    assert len(opened) == 10
    assert [entry.id for entry in opened] == [f"clip{n}" for n in range(12) if n % 5 != 4]
    assert len(list(made.glob("tokens-*.bin"))) > 2
    for number in (0, 1, 6, 11):
        got, expected = opened.get(f"clip{number}"), tokens(number)
        assert torch.equal(got.values_TE, expected.values_TE)
        assert np.array_equal(got.arrival_s, expected.arrival_s)
    assert "clip0" in opened
    assert "clip4" not in opened
    assert [(entry.id, entry.kind) for entry in opened.problems] == [("clip4", "unreadable"), ("clip9", "unreadable")]
    opened.verify()
    problems = [json.loads(line) for line in (made / "problems.jsonl").read_text().splitlines()]
    assert problems[0] == {"id": "clip4", "split": "test", "kind": "unreadable", "reason": "clip4.wav: damaged", "encoded": False}
    assert zendaya.FeatureStore is FeatureStore


def test_a_view_is_the_file_itself_and_cannot_be_written_to(made):
    opened = FeatureStore.open(made)
    view = opened.view("clip6")
    assert not view.values_TE.flags.owndata
    assert not view.values_TE.flags.writeable
    assert not view.arrival_s.flags.writeable
    assert np.shares_memory(view.values_TE, opened.view("clip6").values_TE)
    got = opened.get("clip6")
    got.values_TE.zero_()
    got.arrival_s[:] = 0
    opened.verify()


@given(
    values=st.lists(st.lists(st.floats(-6e4, 6e4, width=32), min_size=33, max_size=33), min_size=1, max_size=4),
    dtype=st.sampled_from(["fp16", "int8", "fp32"]),
)
def test_rounding_is_that_of_the_dtype(values, dtype):
    values_TE = torch.tensor(values, dtype=torch.float32)
    record = pack(Tokens(values_TE, np.arange(len(values)) / 3), dtype)
    got = store._view(record, 0, len(values), 33, dtype).tokens()
    assert np.array_equal(got.arrival_s, np.arange(len(values)) / 3)
    if dtype == "fp32":
        assert torch.equal(got.values_TE, values_TE)
    elif dtype == "fp16":
        assert torch.equal(got.values_TE, values_TE.half().float())
    else:  # half a level of the largest of each group of 32 features
        levels = torch.stack([part.abs().amax(1) / 127 for part in values_TE.split(32, dim=1)], 1)
        assert bool(((got.values_TE - values_TE).abs() <= levels.repeat_interleave(32, 1)[:, :33] * 0.501 + 1e-37).all())


def test_int8_of_a_token_does_not_depend_on_the_tokens_after_it():
    whole, other = tokens(6), tokens(6)
    other.values_TE[3:] *= 1000
    first = [store._view(pack(made, "int8"), 0, 7, DIM, "int8").tokens().values_TE[:3] for made in (whole, other)]
    assert torch.equal(*first)


def test_what_a_dtype_cannot_hold_is_refused():
    big = Tokens(torch.full((2, 3), 7e4), np.zeros(2))
    with pytest.raises(SourceError, match=r"token 0 holds a feature .* beyond ±65504, the limit of fp16; use --dtype fp32"):
        pack(big, "fp16")
    assert pack(big, "int8")
    for bad in (math.nan, math.inf):
        with pytest.raises(SourceError, match=r"token 1 .*not finite"):
            pack(Tokens(torch.tensor([[1.0], [bad]]), np.zeros(2)), "fp32")
    with pytest.raises(ConfigError, match="ids, which only fp32 holds exactly: got dtype fp16"):
        Signature.of(traits(ids=True), encoder_digest="", corpus="c", data_digest="d")
    with pytest.raises(ConfigError, match="dtype must be one of fp16, int8, fp32: got 'fp8'"):
        signature("fp8")


def test_ids_that_two_splits_share_need_the_split(tmp_path):
    with StoreWriter(tmp_path / "s", signature()) as writer:
        for split, seed in (("val_1", 1), ("val_2", 2)):
            writer.add("v/1", split, len(tokens(seed)), pack(tokens(seed), "fp32"))
        writer.finish()
    opened = FeatureStore.open(tmp_path / "s")
    assert torch.equal(opened.get("v/1", "val_2").values_TE, tokens(2).values_TE)
    with pytest.raises(StoreError, match=r"clip 'v/1' is in val_1, val_2: say which split"):
        opened.get("v/1")


def test_a_clip_that_is_not_there_says_why(made):
    opened = FeatureStore.open(made)
    with pytest.raises(StoreError, match=r"no clip 'other' among its 12"):
        opened.get("other")
    with pytest.raises(StoreError, match=r"no clip 'clip0' of split 'train'"):
        opened.get("clip0", "train")
    with pytest.raises(StoreError, match=r"clip 'clip4' could not be encoded: clip4.wav: damaged"):
        opened.get("clip4")


def _sum_in_another_process(opened, names):
    return [float(opened.get(name).values_TE.sum()) for name in names]


def test_processes_share_a_store(made):
    opened, names = FeatureStore.open(made), ["clip0", "clip7", "clip11"]
    expected = _sum_in_another_process(opened, names)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(found == expected for found in threads.map(lambda _: _sum_in_another_process(opened, names), range(8)))
    again = pickle.loads(pickle.dumps(opened))
    assert again.signature == opened.signature
    assert _sum_in_another_process(again, names) == expected
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(_CHILD, {"opened": opened, "names": names, "pipe": theirs}))
    process.start()
    assert ours.recv() == expected
    process.join()


_CHILD = "pipe.send([float(opened.get(name).values_TE.sum()) for name in names])"


# Damage.


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["store.json", "index.jsonl", "tokens-00000.bin", "problems.jsonl"])
def test_a_flipped_bit_anywhere_is_found(made, name):
    size = (made / name).stat().st_size
    for place in sorted({0, size // 3, size // 2, size - 2, size - 1}):
        flip(made / name, place)
        with pytest.raises(StoreError) as raised:
            FeatureStore.open(made).verify()
        assert "\n" not in str(raised.value)
        assert name in str(raised.value) or "signature" in str(raised.value)
        flip(made / name, place)
    FeatureStore.open(made).verify()


@pytest.mark.parametrize("name", ["index.jsonl", "tokens-00001.bin", "problems.jsonl"])
def test_a_file_that_is_cut_longer_or_gone_is_found_on_opening(made, name):
    data = (made / name).read_bytes()
    for damaged in (data[:-1], data + b"x", None):
        (made / name).unlink()
        if damaged is not None:
            (made / name).write_bytes(damaged)
        with pytest.raises(StoreError, match=rf"{name}: expected {len(data)} bytes: got "):
            FeatureStore.open(made)
        (made / name).write_bytes(data)


def test_a_clip_that_is_damaged_is_named(made):
    opened = FeatureStore.open(made)
    entry = opened.find("clip1")
    flip(made / "tokens-00000.bin", entry.offset + 9)
    with pytest.raises(StoreError, match=r"tokens-00000.bin: checksum does not match at clip 'clip1'"):
        FeatureStore.open(made).verify()


def test_what_is_no_store_is_refused(tmp_path, made):
    with pytest.raises(StoreError, match="not a feature store: no such folder"):
        FeatureStore.open(tmp_path / "none")
    with pytest.raises(StoreError, match=r"not a feature store: no store.json in it"):
        FeatureStore.open(tmp_path)
    for text, message in (("{", "not JSON"), ("[]", "got 'another file'"), ('{"zendaya_store": 2}', "format 1: got 2")):
        (tmp_path / "store.json").write_text(text)
        with pytest.raises(StoreError, match=message):
            FeatureStore.open(tmp_path)
    with pytest.raises(StoreError, match=r"a store of another encoder: expected 'whisper', got 'fake'"):
        FeatureStore.open(made, encoder="whisper")
    with pytest.raises(StoreError, match=r"a store of another corpus: expected 'msvd', got 'c'"):
        FeatureStore.open(made, corpus="msvd")


def resign(path, change):
    """What another program might write: a header that is changed, its checksum made anew."""
    header = json.loads((path / "store.json").read_text())
    change(header)
    header.pop("sha256")
    header["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    (path / "store.json").write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["signature"].pop("dim"), "expected a field dim, which is missing"),
        (lambda header: header["signature"].update(dim="5"), "dim: expected int: got '5'"),
        (lambda header: header["signature"].update(dim=0), "dim must be at least 1 feature per token: got 0"),
        (lambda header: header["signature"].update(dim=DIM + 1), "do not follow|do not belong together"),
        (lambda header: header["signature"].update(dtype="pickle"), "dtype: expected 'fp16' or 'int8' or 'fp32'"),
        (lambda header: header["signature"].update(dtype="fp16"), "do not follow|do not belong together"),
        (lambda header: header.update(files={"../../etc/passwd": {"bytes": 1, "sha256": ""}}), "list of files is not that"),
        (lambda header: header.update(files=[]), "list of files is not that"),
        (lambda header: header["files"].update({"index.jsonl": 7}), "lacks sizes and checksums"),
        (lambda header: header["files"].popitem(), "do not belong together"),
    ],
)
def test_a_header_that_lies_is_refused(made, change, message):
    resign(made, change)
    with pytest.raises(StoreError, match=message):
        FeatureStore.open(made)


def test_an_unfinished_store_is_refused_and_says_what_to_do(tmp_path):
    write(tmp_path / "s", finish=False)
    with pytest.raises(StoreError, match=r"not finished: .* run the same zendaya encode again"):
        FeatureStore.open(tmp_path / "s")


# Writers.


def test_a_second_writer_is_refused(tmp_path):
    with StoreWriter(tmp_path / "s", signature()), pytest.raises(StoreError, match="another process is writing to it"):
        StoreWriter(tmp_path / "s", signature())
    with StoreWriter(tmp_path / "s", signature()) as writer:
        writer.fail("a", "b", "c", "d")


def test_a_store_of_something_else_is_not_written_to(tmp_path, made):
    before = contents(made)
    with pytest.raises(StoreError, match=r"holds other features: expected dtype 'fp32': got 'fp16'"):
        StoreWriter(made, signature("fp16"))
    with pytest.raises(StoreError, match=r"expected data_digest 'd': got 'other'"):
        StoreWriter(made, signature(data_digest="other"))
    assert contents(made) == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"not empty, and no feature store: it holds 'thesis.tex'"):
        StoreWriter(tmp_path / "home", signature())
    with pytest.raises(StoreError, match="a file: expected a folder"):
        StoreWriter(tmp_path / "home" / "thesis.tex", signature())


def test_a_finished_store_can_be_added_to(tmp_path, made):
    write(tmp_path / "other", range(5))
    write(tmp_path / "other", range(12))
    assert contents(tmp_path / "other") == contents(made)


def test_a_finished_store_with_nothing_to_add_is_unchanged(made):
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in made.iterdir()}
    write(made)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in made.iterdir()} == before


def test_cutting_forgets_the_last_clips(tmp_path, made):
    write(tmp_path / "short", range(3))
    with StoreWriter(made, signature()) as writer:
        writer.cut(3)
        assert [entry.id for entry in writer.entries] == ["clip0", "clip1", "clip2"]
        writer.finish()
    assert contents(made) == contents(tmp_path / "short")


def other_record(number):
    """Another take of a clip, of the same length: what a store holds after its source was put right."""
    made = tokens(number)
    return len(made), pack(Tokens(made.values_TE + 1, made.arrival_s), "fp32")


def rewrite(path, keep=3, numbers=12):
    """All clips after the first few again, other ones."""
    with StoreWriter(path, signature(), shard_bytes=2000) as writer:
        writer.cut(keep)
        for number in range(writer.num_entries, numbers):
            writer.add(f"clip{number}", "train" if number % 2 else "test", *other_record(number))
        writer.finish()


def held(opened):
    return {entry.id: opened.get(entry.id).values_TE for entry in opened}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 7])
def test_an_open_store_keeps_its_tokens_when_overwritten(made, keep):
    used, unused = FeatureStore.open(made), FeatureStore.open(made)
    before = held(used)
    views = [used.view(entry.id).values_TE for entry in used]
    rewrite(made, keep)
    assert same(held(used), before)
    assert same(held(unused), before)  # though it had read no token before
    assert all(np.array_equal(view, before[entry.id].numpy()) for view, entry in zip(views, used, strict=True))
    assert torch.equal(FeatureStore.open(made).get("clip8").values_TE, tokens(8).values_TE + 1)


def test_a_truncated_store_rewritten_equals_an_undisturbed_one(tmp_path, made):
    expected = contents(made)
    with StoreWriter(made, signature()) as writer:
        writer.cut(3)
        writer.stop()
    write(made)
    assert contents(made) == expected


def test_leftovers_of_a_stopped_writer_stay_for_open_readers(made):
    """A writer that was killed after it had cut the index, before it came to the shards."""
    opened = FeatureStore.open(made)
    before = held(opened)
    with StoreWriter(made, signature()) as writer:
        writer._unseal()
    lines = (made / "index.jsonl").read_bytes().splitlines(keepends=True)
    (made / "index.jsonl").write_bytes(b"".join(lines[:3]))
    rewrite(made)
    assert same(held(opened), before)


@pytest.mark.parametrize("keep", [0, 3, 12])
def test_a_store_written_to_while_it_is_opened_is_refused(made, monkeypatch, keep):
    real = store._map

    def late(path, size):
        monkeypatch.setattr(store, "_map", real)  # the writer opens the store too
        rewrite(made, keep, numbers=20)
        return real(path, size)

    monkeypatch.setattr(store, "_map", late)
    with pytest.raises(StoreError, match=r"while (it|the store) was opened"):
        FeatureStore.open(made)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.ENOLCK, "No locks available")])
def test_a_store_that_cannot_be_resumed_is_left_as_it_is(tmp_path, monkeypatch, error):
    write(tmp_path / "s", finish=False, numbers=range(5))
    with StoreWriter(tmp_path / "s", signature()) as writer:
        writer.stop()
    write(tmp_path / "s", finish=False)
    before = contents(tmp_path / "s")

    def fails(*_):
        raise error

    with monkeypatch.context() as patch:
        if error.errno == errno.ENOLCK:
            patch.setattr("fcntl.flock", fails)
        else:
            patch.setattr(store, "_read_index", fails)
        with pytest.raises(StoreError, match=error.strerror):
            StoreWriter(tmp_path / "s", signature())
    assert contents(tmp_path / "s") == before


def test_clips_that_were_lost_from_the_index_are_written_again(tmp_path):
    """A damaged line of an unfinished store, and all after it, count for nothing; a damaged shard is refused."""
    with StoreWriter(tmp_path / "s", signature(), shard_bytes=2000) as writer:
        for number in range(4):
            writer.add(f"clip{number}", "train" if number % 2 else "test", len(tokens(number)), pack(tokens(number), "fp32"))
        writer.stop()
    lines = (tmp_path / "s" / "index.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "s" / "index.jsonl").write_bytes(b"".join(lines[:2]) + lines[2].replace(b"clip2", b"clip3") + lines[3])
    with StoreWriter(tmp_path / "s", signature()) as writer:
        assert [entry.id for entry in writer.entries] == ["clip0", "clip1"]
        writer.stop()
    os.truncate(tmp_path / "s" / "tokens-00000.bin", 10)
    with pytest.raises(StoreError, match=r"tokens-00000.bin: expected \d+ bytes: got 10; it is damaged"):
        StoreWriter(tmp_path / "s", signature())


class Crash(BaseException):
    """The machine stops here."""


CALLS = ("pwrite", "fsync", "replace", "ftruncate", "open")


def breaking(monkeypatch, at, error, once=False):
    """From its `at`-th call on the system fails; a write is half done by then."""
    count = 0
    for name in CALLS:
        real = getattr(os, name)

        def call(*arguments, real=real, name=name):
            nonlocal count
            count += 1
            if count == at or (count > at and not once):
                if name == "pwrite" and count == at:
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2], arguments[2])
                raise error
            return real(*arguments)

        monkeypatch.setattr(os, name, call)
    return lambda: count


def test_a_crash_at_any_system_call_loses_and_doubles_nothing(tmp_path, made, monkeypatch):
    expected = contents(made)
    monkeypatch.setattr(store, "COMMIT_S", 0.0)  # commit each clip, to have the most places to crash at
    for at in range(1, 1000):
        path = tmp_path / f"s{at}"
        with monkeypatch.context() as patch:
            calls = breaking(patch, at, Crash())
            with contextlib.suppress(Crash):
                write(path)
            if calls() < at:
                break
        write(path)
        assert contents(path) == expected, at
    assert at > 60  # a store of 12 clips takes that many calls


@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=["crash", "full disk"])
def test_a_crash_while_dropping_clips_hurts_no_store_or_reader(tmp_path, made, monkeypatch, error):
    rewrite(shutil.copytree(made, tmp_path / "expected"))
    expected = contents(tmp_path / "expected")
    before = held(FeatureStore.open(made))
    for at in range(1, 1000):
        path = shutil.copytree(made, tmp_path / f"s{at}")
        opened = FeatureStore.open(path)
        with monkeypatch.context() as patch:
            calls = breaking(patch, at, error, once=isinstance(error, OSError))
            with contextlib.suppress(Crash, StoreError):
                rewrite(path)
            if calls() < at:
                break
        assert same(held(opened), before), at
        rewrite(path)
        assert same(held(opened), before), at
        assert contents(path) == expected, at
    assert at > 20


def test_a_full_disk_keeps_what_was_done(tmp_path, made, monkeypatch):
    expected = contents(made)
    monkeypatch.setattr(store, "COMMIT_S", 0.0)
    messages = set()
    for at in range(8, 60):
        path = tmp_path / f"s{at}"
        with monkeypatch.context() as patch:
            breaking(patch, at, OSError(errno.ENOSPC, "No space left on device"), once=True)
            with pytest.raises(StoreError) as raised:
                write(path)
        assert "\n" not in str(raised.value)
        messages.add(str(raised.value).partition(": ")[2])
        with StoreWriter(path, signature()) as writer:
            kept = len(writer.entries)
        assert (f"the {kept} clips that are done are kept" if kept else "No space left on device; make room") in str(raised.value), at
        write(path)
        assert contents(path) == expected
    assert (
        "cannot be written: No space left on device; make room and run the same command again: the 3 clips that are done are kept"
        in messages
    )
