"""Checkpoints: saved whole, loaded to the bit, refused where they are damaged or claim too much."""

import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc

import pytest
import safetensors.torch
import torch
from huggingface_hub import HfApi

from zendaya import Model, PowerLaw, Tokenizer
from zendaya.errors import CheckpointError, ConfigError
from zendaya.nn.checkpoint import RECIPE, RunRecord, digest, read_run_record

TEXTS = ["a person is sitting on a bed", "a person runs into a room", "naïve café, 東京", "person drinks a glass of water"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, vocab_size=300)


@pytest.fixture
def model(tokenizer):
    return Model.from_preset("tiny", tokenizer=tokenizer, seed=4)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        Model.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_saved_model_loads_to_the_bit(model, folder):
    again = Model.from_pretrained(folder)
    assert again.config == model.config
    assert not again.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    assert again.tokenizer.encode(TEXTS[2]) == model.tokenizer.encode(TEXTS[2])
    source = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    one, other = (list(m.open(PowerLaw(0.5)).push(source)) for m in (model, again))
    assert one == other
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


def test_a_model_without_a_tokenizer_is_saved_too(tmp_path, folder):
    Model.from_preset("tiny", length="fix", history=False).save_pretrained(folder)  # over one that had a tokenizer
    assert Model.from_pretrained(folder).tokenizer is None
    assert Model.from_pretrained(folder).config.length == "fix"


def test_loading_leaves_the_random_generator_alone(folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Model.from_pretrained(folder)
    assert torch.equal(torch.rand(3), expected)


def test_every_flipped_bit_is_noticed(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = (
        [draw.randrange(8, header) for _ in range(40)] + [draw.randrange(header, len(whole)) for _ in range(40)] + [0, 3, len(whole) - 1]
    )
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            refused(folder)
        except BaseException:
            # A flip that only changes the header's padding or its spacing changes nothing that is read.
            assert place < header
            assert whole[place : place + 1] == b" "
    path.write_bytes(whole)
    Model.from_pretrained(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(folder, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert "model.safetensors" in refused(folder)


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("pickle-was-run",))


def test_a_pickle_is_refused_and_never_run(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bomb = pickle.dumps(_Bomb())
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "pytorch_model.bin").write_bytes(bomb)
    assert "pickle" in refused(tmp_path / "only")
    assert "pickle" in refused(tmp_path / "only" / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(bomb)
    assert "pickle" in refused(folder)
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert "pickle" in refused(folder)
    assert not (tmp_path / "pickle-was-run").exists()


def test_mixed_checkpoints_are_refused(folder, tmp_path):
    Model.from_preset("tiny", seed=1, max_steps=20).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", folder / "config.json")
    assert "does not match" in refused(folder)


def test_an_edited_copy_is_refused_a_deleted_one_is_not(folder):
    config = json.loads((folder / "config.json").read_text())
    config["decoder"]["dim"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "not JSON" in refused(folder)
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "tokenizer.json" in refused(folder)
    (folder / "tokenizer.json").unlink()
    Model.from_pretrained(folder)


def resave(folder, change):
    """Write the weights file again with changed content and a right checksum: the mismatch itself must be found."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    change(tensors, metadata)
    metadata["sha256"] = digest(tensors, metadata)
    safetensors.torch.save_file(tensors, path, metadata)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, metadata: tensors.pop("decoder.tokens.weight"),
        lambda tensors, metadata: tensors.update(extra=torch.zeros(1)),
        lambda tensors, metadata: tensors.update({"decoder.positions.weight": torch.zeros(3, 64)}),
        lambda tensors, metadata: metadata.update(config="{}"),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"window_tokens"', '"widow"')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"window_tokens": 24', '"window_tokens": 2400')),
        lambda tensors, metadata: metadata.update(tokenizer="[]"),
        lambda tensors, metadata: metadata.update(tokenizer="{"),
        lambda tensors, metadata: metadata.update(config="not json"),
        lambda tensors, metadata: metadata.update(config="[" * 100_000),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"max_steps": 32', '"max_steps": 20.5')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"length_hidden": 64', '"length_hidden": 64.0')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"dim": 64', '"dim": 1000000000000')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"history": true', '"history": "no"')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"prompt": [1]', '"prompt": [1.5]')),
        lambda tensors, metadata: metadata.update(config=metadata["config"].replace('"prompt": [1]', '"prompt": 1')),
        lambda tensors, metadata: tensors.update({"decoder.positions.weight": torch.zeros(65, 64, dtype=torch.long)}),
        lambda tensors, metadata: tensors.update({"decoder.positions.weight": torch.zeros(65, 64, dtype=torch.float16)}),
        lambda tensors, metadata: tensors.update({"decoder.positions.weight": torch.full((65, 64), torch.nan)}),
        lambda tensors, metadata: metadata.update(zendaya_format="99"),
        lambda tensors, metadata: metadata.pop("config"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(folder, change):
    resave(folder, change)
    refused(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 10**6), ("layers", 1000), ("source_layers", 10**6), ("dim", 10**12), ("max_rows", 10**15), ("max_source", 10**15),
        ("vocab_size", 10**30), ("ffn_dim", 2**16), ("heads", 1024),
    ],
)  # fmt: skip
def test_absurd_sizes_are_refused_before_allocation(folder, field, value):
    def claim(tensors, metadata):
        config = json.loads(metadata["config"])
        config["decoder"][field] = value
        metadata["config"] = json.dumps(config)

    resave(folder, claim)
    tracemalloc.start()
    begun = time.monotonic()
    message = refused(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "model.safetensors" in message
    assert time.monotonic() - begun < 10
    assert peak < 64 * 2**20


def test_other_peoples_safetensors_are_refused(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert "expected a checkpoint of this library" in refused(tmp_path)


@pytest.mark.parametrize("where", ["/no/such/folder", "./nothing", "a/b/c", "just-a-name"])
def test_a_missing_folder_is_one_clear_line(where):
    assert "no such folder" in refused(where)


@pytest.mark.parametrize("where", ["x" * 5000, "a\0b"])
def test_an_impossible_path_is_one_clear_line(where, model):
    assert "not a path" in refused(where) or "no such folder" in refused(where)
    with pytest.raises(CheckpointError, match="cannot be written"):
        model.save_pretrained(where)


def test_a_failed_save_keeps_the_old_model(model, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = Model.from_preset("tiny", seed=9, tokenizer=model.tokenizer)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        other.save_pretrained(folder)
    monkeypatch.setattr(os, "fsync", real)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    other.save_pretrained(folder)
    assert torch.equal(Model.from_pretrained(folder).decoder.tokens.weight, other.decoder.tokens.weight)


def test_an_interrupted_save_leaves_a_whole_model(model, folder, monkeypatch):
    other = Model.from_preset("tiny", seed=9, tokenizer=model.tokenizer)
    real, calls = os.replace, []

    def once(source, target):
        if calls:
            raise KeyboardInterrupt
        calls.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(folder)
    monkeypatch.undo()
    assert torch.equal(Model.from_pretrained(folder).decoder.tokens.weight, other.decoder.tokens.weight)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


KILLED = """
import sys, itertools
from zendaya import Model, Tokenizer
tokenizer = Tokenizer.train(["a b c"], vocab_size=270)
models = [Model.from_preset("tiny", seed=1, tokenizer=tokenizer), Model.from_preset("tiny", seed=2, max_steps=20)]
print("ready", flush=True)
for model in itertools.cycle(models):
    model.save_pretrained(sys.argv[1])
"""


def test_a_killed_save_leaves_a_whole_model(folder):
    draw = random.Random(0)
    seen = set()
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(draw.uniform(0.01, 0.3))
        process.kill()
        process.wait()
        process.stdout.close()
        seen.add(Model.from_pretrained(folder).config.max_steps)
    assert seen <= {20, 32}


def test_concurrent_saves_and_loads_never_mix(folder):
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        loaded = 0
        for _ in range(60):
            try:
                loaded += Model.from_pretrained(folder).config.max_steps in (20, 32)
            except CheckpointError as error:  # the copies beside the weights may be another save's for a moment
                if "does not match" not in str(error):
                    raise
        assert loaded > 10
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_old_files_of_killed_saves_are_removed(model, folder):
    for name, age_s in ((".model.safetensors.old", 7200), (".model.safetensors.new", 0)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    model.save_pretrained(folder)
    assert not (folder / ".model.safetensors.old").exists()
    assert (folder / ".model.safetensors.new").exists()


def test_saving_to_an_unwritable_place_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        model.save_pretrained(tmp_path / "file")


def test_a_hub_id_is_read_from_the_hubs_cache(model, folder, tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--captions" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (tmp_path / "hub" / "models--someone--captions" / "refs").mkdir()
    (tmp_path / "hub" / "models--someone--captions" / "refs" / "main").write_text("0" * 40)
    again = Model.from_pretrained("someone/captions", cache_dir=tmp_path / "hub", local_files_only=True)
    assert torch.equal(again.decoder.tokens.weight, model.decoder.tokens.weight)
    with pytest.raises(CheckpointError, match="not fetched"):
        Model.from_pretrained("someone/else", cache_dir=tmp_path / "hub", local_files_only=True)


@pytest.mark.parametrize("name", ["local", "someone/captions"])
def test_a_misspelt_option_is_refused(folder, name):
    with pytest.raises(ConfigError, match=r"no option 'map_loaction'; expected map_location or one of .*revision"):
        Model.from_pretrained(folder if name == "local" else name, map_loaction="cpu")
    assert Model.from_pretrained(folder, revision="main", local_files_only=True).config == Model.from_pretrained(folder).config


def test_an_unreachable_hub_fails_at_once(tmp_path, monkeypatch):
    def no_address(*arguments, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    before = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be reached"):
        Model.from_pretrained("someone/else", cache_dir=tmp_path)
    assert time.monotonic() - before < 5


def test_push_to_hub_uploads_what_is_saved(model, tmp_path, monkeypatch):
    uploaded = {}

    def upload_folder(self, *, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "uploaded")
        uploaded["repo"] = repo_id
        return "done"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **options: type("Repo", (), {"repo_id": repo_id}))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert model.push_to_hub("someone/captions") == "done"
    assert uploaded["repo"] == "someone/captions"
    assert torch.equal(Model.from_pretrained(tmp_path / "uploaded").decoder.tokens.weight, model.decoder.tokens.weight)


def test_the_run_record_is_found_beside_a_checkpoint(tmp_path):
    checkpoint = tmp_path / "run" / "best"
    checkpoint.mkdir(parents=True)
    assert read_run_record(checkpoint) == RunRecord()
    for damaged in ("{", "[]", '{"recipe": 3}', '{"rho": "much"}'):
        (tmp_path / "run" / RECIPE).write_text(damaged)
        assert read_run_record(checkpoint) == RunRecord()
    record = {"recipe": {"encoder": "whisper:tiny.en", "lower": True, "loop": {"seed": 7}}, "rho": 2}
    (tmp_path / "run" / RECIPE).write_text(json.dumps(record))
    expected = RunRecord(encoder="whisper:tiny.en", rho=2.0, seed=7, lower=True)
    assert read_run_record(checkpoint) == read_run_record(tmp_path / "run") == expected
