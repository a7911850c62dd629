"""Feature files of every format: rows as stored, and one error of ours for every damage."""

import io
import struct
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest
import safetensors.numpy

from zendaya.data.features import files
from zendaya.data.features.files import read_array, read_features
from zendaya.errors import SourceError

ROWS = np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32)


def write(folder, kind, array=ROWS):
    path = folder / f"clip.{kind}"
    if kind == "npy":
        np.save(path, array)
    elif kind == "npz":
        np.savez_compressed(path, clip=array)
    elif kind == "safetensors":
        safetensors.numpy.save_file({"clip": np.ascontiguousarray(array)}, path)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("clip/c3d_features", data=array)
    return path


def error_of(*arguments, **settings):
    with pytest.raises(SourceError) as caught:
        read_features(*arguments, **settings)
    message = str(caught.value)
    assert message.startswith(str(arguments[0]))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5", "h5"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int8])
def test_every_format_gives_the_rows(tmp_path, kind, dtype):
    path = write(tmp_path, kind, (10 * ROWS).astype(dtype))
    got = read_features(path, dim=12)
    assert got.dtype == np.float32
    assert np.array_equal(got, (10 * ROWS).astype(dtype).astype(np.float32))
    assert "expected features of shape (any, 500): got (40, 12)" in error_of(path, dim=500)


def test_names(tmp_path):
    with h5py.File(tmp_path / "all.hdf5", "w") as file:
        for name in "abc":
            file.create_dataset(f"v_{name}/c3d_features", data=ROWS + ord(name), compression="gzip", chunks=(8, 12))
    for name in ("v_b", "v_b/c3d_features", "/v_b/c3d_features"):
        assert np.array_equal(read_features(tmp_path / "all.hdf5", name), ROWS + ord("b"))
    assert "expected one of 'v_a', 'v_b', 'v_c'" in error_of(tmp_path / "all.hdf5")
    assert "no '/v_d' in it" in error_of(tmp_path / "all.hdf5", "v_d")
    assert "no '/v_a/c3d_features/x' in it" in error_of(tmp_path / "all.hdf5", "v_a/c3d_features/x")
    np.savez(tmp_path / "all.npz", a=ROWS, b=-ROWS)
    assert np.array_equal(read_features(tmp_path / "all.npz", "b"), -ROWS)
    assert "no array 'c' in it" in error_of(tmp_path / "all.npz", "c")
    np.save(tmp_path / "fortran.npy", np.asfortranarray(ROWS))
    assert np.array_equal(read_features(tmp_path / "fortran.npy"), ROWS)
    assert "without a name" in error_of(tmp_path / "fortran.npy", "a")


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
def test_values_and_shapes_that_cannot_be(tmp_path, kind):
    for value in (np.nan, np.inf, 1e31):
        bad = ROWS.copy()
        bad[7, 3] = value
        assert "row 7 holds a feature that is not finite" in error_of(write(tmp_path, kind, bad))
    assert "empty" in error_of(write(tmp_path, kind, ROWS[:0]))
    assert "got (12,)" in error_of(write(tmp_path, kind, ROWS[0]))


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 0.99])
def test_cut_files(tmp_path, kind, share):
    path = write(tmp_path, kind)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    error_of(path)


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
def test_other_files_under_a_name(tmp_path, kind):
    path = tmp_path / f"words.{kind}"
    path.write_text("these are words " * 100)
    error_of(path)
    assert "no such file" in error_of(tmp_path / f"none.{kind}")


def test_safetensors_of_no_numbers(tmp_path):
    safetensors.numpy.save_file({"clip": np.ones((3, 2), bool)}, tmp_path / "bool.safetensors")
    assert "expected an array of numbers" in error_of(tmp_path / "bool.safetensors")


def test_pickles_are_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    np.save(tmp_path / "object.npy", np.array([Payload()]), allow_pickle=True)
    np.savez(tmp_path / "object.npz", clip=np.array([Payload()], object))
    for name in ("object.npy", "object.npz"):
        assert "Python objects, which can run code" in error_of(tmp_path / name)
    (tmp_path / "clip.pt").write_bytes(b"")
    assert "expected .hdf5" in error_of(tmp_path / "clip.pt")
    assert not ran.exists()


def npy_header(shape, dtype="<f4"):
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    head = head.ljust(118 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()


@pytest.mark.parametrize("shape", ["(10**9, 500)", "(1000000000000, 500)", "(-5, 12)", "(2, 12)", "(40, 12)"])
def test_headers_that_promise_too_much(tmp_path, shape):
    data = npy_header(shape) + ROWS[:20].tobytes()
    (tmp_path / "bad.npy").write_bytes(data)
    error_of(tmp_path / "bad.npy")
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("clip.npy", data)
    error_of(tmp_path / "bad.npz")


def test_zip_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("clip.npy", npy_header("(1048576, 12)") + bytes(4 * 12 * 2**20))
    assert (tmp_path / "bomb.npz").stat().st_size < 2**17
    assert "zip bomb" in error_of(tmp_path / "bomb.npz")


def test_a_zip_that_lies_about_its_size(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("clip.npy", npy_header("(100000, 12)") + bytes(4 * 12 * 100_000))
    data, honest = buffer.getvalue(), struct.pack("<I", 128 + 4 * 12 * 100_000)
    assert data.count(honest) == 2  # in the member's header and in the directory
    small = npy_header("(10, 12)")
    (tmp_path / "lie.npz").write_bytes(data.replace(honest, struct.pack("<I", len(small) + 480)))
    error_of(tmp_path / "lie.npz")


def test_hdf5_never_leads_out_of_the_file(tmp_path):
    secret = tmp_path / "secret.hdf5"
    with h5py.File(secret, "w") as file:
        file["clip"] = ROWS
    (tmp_path / "secret.raw").write_bytes(ROWS.tobytes())
    layout = h5py.VirtualLayout(ROWS.shape, np.float32)
    layout[:] = h5py.VirtualSource(str(secret), "clip", ROWS.shape)
    with h5py.File(tmp_path / "bad.hdf5", "w") as file:
        file["own"] = ROWS
        file["external"] = h5py.ExternalLink(str(secret), "/clip")
        file["folder"] = h5py.ExternalLink(str(secret), "/")
        file["soft"] = h5py.SoftLink("/external")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file.create_dataset("raw", ROWS.shape, np.float32, external=[(str(tmp_path / "secret.raw"), 0, h5py.h5f.UNLIMITED)])
        file.create_virtual_dataset("virtual", layout)
    bad = tmp_path / "bad.hdf5"
    for name in ("external", "folder/clip", "soft", "dangling"):
        assert "links are not followed" in error_of(bad, name)
    for name in ("raw", "virtual"):
        assert "other files, which are not read" in error_of(bad, name)
    assert np.array_equal(read_features(bad, "own"), ROWS)
    with h5py.File(tmp_path / "only.hdf5", "w") as file:
        file["clip"] = h5py.ExternalLink(str(secret), "/clip")
    assert "links are not followed" in error_of(tmp_path / "only.hdf5")


def test_hdf5_that_declares_what_it_does_not_hold(tmp_path):
    with h5py.File(tmp_path / "bad.hdf5", "w") as file:
        file.create_dataset("huge", (10**12, 500), np.float32, chunks=(100, 500))
        file.create_dataset("unwritten", (100, 500), np.float32, chunks=(100, 500))
        file.create_dataset("words", data=["a", "b"])
        file.create_dataset("null", dtype=h5py.Empty("f4").dtype, data=h5py.Empty("f4"))
        file["type"] = np.dtype("f4")
        file.create_dataset("complex", data=ROWS.astype(np.complex64))
        file.create_group("loop")
        file["loop/self"] = file["loop"]
    bad = tmp_path / "bad.hdf5"
    assert "declares shape (1000000000000, 500)" in error_of(bad, "huge")
    assert "stores nothing" in error_of(bad, "unwritten")
    assert "Python objects" in error_of(bad, "words")
    assert "without a shape" in error_of(bad, "null")
    assert "expected a dataset" in error_of(bad, "type")
    assert "expected an array of numbers" in error_of(bad, "complex")
    assert "groups inside groups" in error_of(bad, "loop")


def declare(folder, kind, shape):
    """A small file that declares many values of one byte each."""
    path, size = folder / f"large.{kind}", int(np.prod(shape))
    if kind == "npy":
        with path.open("wb") as file:
            file.write(npy_header(str(shape), "|i1"))
            file.truncate(128 + size)  # a hole, which takes no room
    elif kind == "npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("clip.npy", "w") as file:
            file.write(npy_header(str(shape), "|i1"))
            for _ in range(size // 2**20):
                file.write(bytes(2**20))
    elif kind == "safetensors":
        head = f'{{"clip":{{"dtype":"I8","shape":[{shape[0]},{shape[1]}],"data_offsets":[0,{size}]}}}}'.encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + size)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("clip", shape, np.int8, chunks=(2**18, 8), compression="gzip")[:1] = 1
    return path


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
def test_values_are_counted_as_the_floats_they_become(tmp_path, monkeypatch, kind):
    """What is small in its file and would be four times as large in memory is refused before any memory is asked for."""
    monkeypatch.setattr(files, "MAX_BYTES", 2**24)
    shape = (2**20, 8)  # half of the limit as int8, twice the limit as float32
    path = declare(tmp_path, kind, shape)
    tracemalloc.start()
    message = error_of(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "declares shape (1048576, 8)" in message
    assert f"expected at most {2**24}; store one array per clip" in message
    assert peak < 2**20
    if kind in ("npy", "npz"):  # as it is stored it fits, as the packed features of a whole corpus do
        assert read_array(path).shape == shape


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
def test_no_more_is_held_than_the_features(tmp_path, kind):
    path = write(tmp_path, kind, np.ones((2**15, 512), np.float32))
    read_features(path)
    tracemalloc.start()
    rows = read_features(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes + 2**24


def test_a_header_that_claims_gigabytes(tmp_path):
    with zipfile.ZipFile(tmp_path / "head.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("clip.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**26) + b" " * 2**26)
    tracemalloc.start()
    assert "not an npy array" in error_of(tmp_path / "head.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
@pytest.mark.parametrize("read", [read_features, read_array])
def test_memory_that_is_not_there(tmp_path, monkeypatch, kind, read):
    path = write(tmp_path, kind)

    def full(*arguments, **settings):
        raise MemoryError

    monkeypatch.setattr(files, "_check_array", full)
    with pytest.raises(SourceError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: does not fit into the memory")


def test_hdf5_that_was_half_written(tmp_path):
    path = tmp_path / "half.hdf5"
    with h5py.File(path, "w") as file:
        for name, rows in (("half", 20), ("whole", 40)):
            file.create_dataset(f"{name}/c3d", (40, 12), np.float32, chunks=(7, 5))[:rows] = ROWS[:rows]
    message = error_of(path, "half")
    assert message.startswith(f"{path}, '/half/c3d': half written: shape (40, 12) needs 18 chunks and 9 are stored")
    assert np.array_equal(read_features(path, "whole"), ROWS)


def test_hdf5_of_huge_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 2**16)
    with h5py.File(tmp_path / "wide.hdf5", "w") as file:
        file.create_dataset("clip", (1, 12), np.float32, maxshape=(None, 12), chunks=(2**12, 12), compression="gzip")[:] = 1
    assert "stored in chunks of (4096, 12)" in error_of(tmp_path / "wide.hdf5")


def test_hdf5_filters_from_the_machine_are_not_loaded(tmp_path):
    path = tmp_path / "packed.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("clip", data=ROWS, chunks=(8, 12), compression="lzf")
    assert np.array_equal(read_features(path), ROWS)
    data = path.read_bytes()
    assert data.count(struct.pack("<H", 32000)) == 1
    path.write_bytes(data.replace(struct.pack("<H", 32000), struct.pack("<H", 32001)))
    assert "packed by filter 32001" in error_of(path)


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "hdf5"])
def test_damage_anywhere_is_an_error_of_ours(tmp_path, kind):
    """Bytes overwritten at random: features or an error of ours, never another exception."""
    path, generator, errors = write(tmp_path, kind), np.random.default_rng(0), []
    data = path.read_bytes()
    for trial in range(400):
        broken = bytearray(data)
        for place in generator.integers(0, len(data) if trial % 2 else min(700, len(data)), generator.integers(1, 12)):
            broken[place] = generator.integers(256)
        path.write_bytes(broken)
        try:
            read_features(path)
        except SourceError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all(error.startswith(str(path)) and "\n" not in error for error in errors)
