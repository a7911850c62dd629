"""Adapters on a small random Whisper: kept, refused, merged; the batched encoder against the stream; the task that trains them."""

import dataclasses
import importlib.resources
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from zendaya import Model, PowerLaw
from zendaya.audit import audit
from zendaya.audit.raw import audit_pipeline
from zendaya.encoders.base import encode
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.errors import CheckpointError, ConfigError
from zendaya.nn.adapter import ADAPTER, Adapter, interpolated
from zendaya.nn.whisper import has_bfloat16, load_encoder, load_weights
from zendaya.runtime.loading import load_adapted
from zendaya.runtime.options import DecodeOptions
from zendaya.runtime.pipeline import Pipeline
from zendaya.sources.media import SAMPLE_RATE, read_audio
from zendaya.training.adapt import AdaptConfig, Adapting, AdaptTask, SpeechExample, SpokenWord
from zendaya.training.labels import Label, _path, dress, make_labels, read_labels, write_labels
from zendaya.training.whisper_batch import Versions, encode_batch, encode_versions, log_mel, mel_filters

transformers = pytest.importorskip("transformers", reason="the extra 'audio' is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small random Whisper, saved in the hub's own format."""
    import tokenizers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=600, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).eval().save_pretrained(folder)
    backend = tokenizers.Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    backend.add_special_tokens(["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>", "<|startofprev|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def config(base):
    return AdaptConfig(base=base, rank=4, window_tokens=200, overlap_s=1.0, max_steps=60, half_precision=False)


@pytest.fixture(scope="module")
def task(config):
    rng = np.random.default_rng(0)
    said = tuple(SpokenWord((i, i + 1), 0.4 * i + 0.1, 0.4 * i + 0.3) for i in range(6))
    utterance = ((rng.standard_normal(3 * SAMPLE_RATE) * 1600).astype(np.int16), said)
    found = [SpeechExample((utterance,)), SpeechExample((utterance, utterance, utterance))]
    task = AdaptTask(config, {"train": found, "valid": found})
    with torch.no_grad():  # as if it had been trained
        for parameter in task.module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return task


@pytest.fixture(scope="module")
def saved(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    task.save(folder)
    return folder


def sound(seconds, seed=0):
    rng = np.random.default_rng(seed)
    return np.convolve(rng.standard_normal(int(seconds * SAMPLE_RATE)), np.ones(8) / 80, "same").astype(np.float32)


def test_merged_weights_equal_the_trained_modules(task, saved):
    adapted, module = load_adapted(saved, precision="float32"), task.module
    mel = log_mel([sound(2.5)], mel_filters(80), block=50, floor=-7.0)
    with torch.no_grad():
        theirs, ours = encode_batch(module.encoder, mel, block=50), encode_batch(adapted.encoder.encoder, mel, block=50)
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)  # kept in fp16
        batch = adapted.model.batch([ours[0]], [[5, 6, 7]], PowerLaw(0.5))
        torch.testing.assert_close(adapted.model(batch), module.model(batch), atol=2e-2, rtol=0)
    assert type(adapted.model) is Model
    assert not any("parametrizations" in name for name in adapted.model.state_dict())
    again = load_adapted(saved / ADAPTER, precision="float32")
    assert again.digest == adapted.digest == Adapter.load(saved / ADAPTER).digest


def test_a_new_adapter_equals_its_base(config, base):
    fresh = Adapting(dataclasses.replace(config, seed=3))
    mel = log_mel([sound(1.5)], mel_filters(80), block=50, floor=-7.0)
    with torch.no_grad():
        torch.testing.assert_close(
            encode_batch(fresh.encoder, mel, block=50), encode_batch(load_encoder(load_weights(base)), mel, block=50)
        )


def test_interpolation_by_half_is_half_way_to_the_base(task, base):
    module = task.module
    soft = interpolated(task.adapter().tensors, module.base, 0.5)
    encoder = load_encoder(load_weights(base))
    norm, query = "encoder.layer_norm.weight", "encoder.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(soft[norm].float(), (encoder.layer_norm.weight + module.encoder.layer_norm.weight) / 2, atol=1e-3, rtol=0)
    half = soft[f"{query}.up"].float() @ soft[f"{query}.down"].float()
    whole = module.encoder.layers[0].self_attn.q_proj.weight - encoder.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(half, whole / 2, atol=1e-3, rtol=0)


def test_every_damage_is_refused(saved, tmp_path):
    data = (saved / ADAPTER).read_bytes()
    for cut in (0, 7, len(data) // 2, len(data) - 1):
        (tmp_path / ADAPTER).write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load_adapted(tmp_path)
    for place in np.random.default_rng(0).integers(8, len(data), 20):
        (tmp_path / ADAPTER).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError):
            load_adapted(tmp_path)
    with pytest.raises(CheckpointError, match="no adapter of that name"):
        load_adapted("no-such")
    with pytest.raises(CheckpointError, match="no such adapter"):
        load_adapted(tmp_path / "none.safetensors")


def test_provisional_tokens_and_overlap_are_kept(saved, tmp_path):
    adapter = Adapter.load(saved / ADAPTER)
    older = Adapter(dataclasses.replace(adapter.config, revise_s=0.0), adapter.tensors)
    assert "revise_s" not in older._metadata()["adapter"]  # older files keep their digests
    model = dataclasses.replace(adapter.config.model, overlap_tokens=20)
    Adapter(dataclasses.replace(adapter.config, revise_s=1.5, model=model), adapter.tensors).save(tmp_path / ADAPTER)
    adapted = load_adapted(tmp_path)
    assert adapted.encoder.revise == 75
    assert adapted.model.config.overlap_tokens == 20
    assert (load_adapted(saved).encoder.revise, load_adapted(saved).model.config.overlap_tokens) == (50, 50)


def test_another_base_is_refused(saved, tmp_path):
    adapter = Adapter.load(saved / ADAPTER)
    Adapter(dataclasses.replace(adapter.config, base_digest="0" * 64), adapter.tensors).save(tmp_path / ADAPTER)
    with pytest.raises(CheckpointError, match="base"):
        load_adapted(tmp_path)


def test_tensors_that_do_not_fit_are_refused(saved, tmp_path):
    adapter = Adapter.load(saved / ADAPTER)
    for change in ("missing", "wrong shape", "not finite"):
        tensors = dict(adapter.tensors)
        name = next(name for name in tensors if name.endswith(".bias"))
        if change == "missing":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:-1] if change == "wrong shape" else tensors[name] * torch.nan
        Adapter(adapter.config, tensors).save(tmp_path / ADAPTER)
        with pytest.raises(CheckpointError):
            load_adapted(tmp_path)
    Model.from_preset("tiny").save_pretrained(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="whole checkpoint"):
        Adapter.load(tmp_path / "whole" / "model.safetensors")


@pytest.mark.parametrize("block", [12, 50])
def test_a_batch_is_encoded_as_the_stream_is(base, block):
    encoder = load_encoder(load_weights(base))
    blocks = WhisperBlocks(encoder, "small", block_s=block / 50)
    recordings = [sound(seconds, i) for i, seconds in enumerate((3.21, 0.5, 7.0, 30.0))]
    with torch.no_grad():
        batch = encode_batch(encoder, log_mel(recordings, mel_filters(80), block=block, floor=blocks.floor), block=block)
    for recording, ours in zip(recordings, batch, strict=True):
        theirs = encode(blocks, [recording]).values_TE
        torch.testing.assert_close(ours[: theirs.shape[0]], theirs, atol=1e-4, rtol=0)


def test_bfloat16_is_close_and_independent_of_chunking(saved):
    single, half = load_adapted(saved, precision="float32").encoder, load_adapted(saved, precision="bfloat16").encoder
    assert single.traits.name != half.traits.name
    voice = sound(4)
    expected, got = encode(single, [voice]).values_TE, encode(half, [voice]).values_TE
    assert got.dtype == torch.float32
    assert not torch.equal(got, expected)
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0)
    for size in (1600, 777, 33333):
        chunks = [voice[first : first + size] for first in range(0, len(voice), size)]
        assert torch.equal(encode(half, chunks).values_TE, got)
    chosen = load_adapted(saved, precision="auto").encoder.traits.name
    assert chosen == (half if has_bfloat16() else single).traits.name
    with pytest.raises(ConfigError, match="precision must be one of auto, float32, bfloat16: got 'int8'"):
        load_adapted(saved, precision="int8")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_adapted_model_passes_the_audit(saved, precision):
    adapted = load_adapted(saved, precision=precision)
    report = audit(adapted.model, PowerLaw(0.5), cuts=1, max_source=40, max_steps=8)
    assert report.passed, report.first
    options = DecodeOptions(schedule=PowerLaw(0.7), voice="off")
    through = audit_pipeline(lambda: Pipeline.open(adapted.model, adapted.encoder, options), sound(8), num_cuts=2)
    assert through.clean, str(through)


@pytest.mark.parametrize(("block", "revise"), [(16, 32), (25, 0), (50, 20)])
def test_versions_are_those_of_the_stream(base, block, revise):
    encoder = load_encoder(load_weights(base))
    blocks = WhisperBlocks(encoder, "small", block_s=block / 50, revise_s=revise / 50)
    voice = sound(block * 8 / 50)
    versions = Versions(tuple(range(block, 8 * block + 1, block)), revise)
    with torch.no_grad():
        ours_MD = encode_versions(encoder, log_mel([voice], mel_filters(80), block=block, floor=blocks.floor), versions)
    state = blocks.start()
    heard = np.concatenate([voice, np.zeros(400, np.float32)])  # the last block is complete a little after its end
    given = [*blocks.blocks(state, heard)]
    torch.testing.assert_close(ours_MD, torch.cat([tokens.values_TE for tokens in given]), atol=1e-4, rtol=0)
    # A row that reads up to the end of a block has what the stream held then.
    held_TD = torch.zeros(0, ours_MD.shape[1])
    for end, tokens in zip(versions.ends, given, strict=True):
        held_TD = torch.cat([held_TD[: held_TD.shape[0] - tokens.revised], tokens.values_TE])
        (seen_M,) = versions.visible(torch.tensor([end]))
        order = versions.token_M[seen_M].argsort()
        torch.testing.assert_close(ours_MD[seen_M][order], held_TD, atol=1e-4, rtol=0)
        (less_M,) = versions.visible(torch.tensor([end - 3]))
        assert int(less_M.sum()) == end - 3


def test_spans_tell_what_was_heard(task):
    rng, said = np.random.default_rng(5), [t for _, words in task.examples["train"][1].utterances for word in words for t in word.ids]
    text, early, late = " ".join(map(str, said)), 0, 0
    for _ in range(40):
        (span,) = task.collate("train", [1], rng)
        assert " ".join(map(str, span.ids)) in text  # a part of it, nothing left out between
        horizons = span.horizons_N.tolist()
        assert horizons == sorted(horizons)
        assert horizons[0] >= 1
        assert horizons[-1] <= span.num_source <= span.versions.ends[-1]
        assert span.versions.final_M.sum() == span.versions.ends[-1]
        assert not span.unheard_N[-1]
        early, late = early + int(span.unheard_N.sum()), late + int((~span.unheard_N).sum())
    assert early > 20
    assert late > early


def test_sound_without_words_teaches_features_alone(task):
    utterance_S, _ = task.examples["train"][0].utterances[0]
    wordless = AdaptTask(task.config, {"train": [SpeechExample(((utterance_S, ()),), worded=False)], "valid": []})
    losses = {name: part.detach() for name, part in wordless.module(wordless.collate("train", [0], np.random.default_rng(0))).items()}
    assert float(losses["feature"]) > 0
    assert [float(losses[name]) for name in ("nll", "imitation", "length")] == [0, 0, 0]
    assert wordless.counts("train", [0])["feature"] == 150


def test_validation_is_repeatable_and_losses_are_sums(task):
    one, other = (task.module(task.collate("valid", [0, 1], np.random.default_rng(seed))) for seed in (0, 1))
    assert {k: float(v.detach()) for k, v in one.items()} == {k: float(v.detach()) for k, v in other.items()}
    alone = [task.module(task.collate("valid", [i], np.random.default_rng(0))) for i in (0, 1)]
    for name in task.weights:
        assert float(one[name].detach()) == pytest.approx(sum(float(each[name].detach()) for each in alone), rel=1e-4)
        assert task.counts("valid", [0, 1])[name] > 0


def test_only_adapters_and_the_length_head_learn(task):
    task.module.zero_grad()
    sum(task.module(task.collate("train", [0, 1], np.random.default_rng(0))).values()).backward()
    for name, parameter in task.module.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert not task.module.model.decoder.tokens.weight.requires_grad


def test_labels_take_case_and_punctuation_of_whisper(tmp_path):
    heard = "Well-known Mr. Smith, now -- at 20 past. Yes, I've come"
    words, _ = dress(heard, "WELL KNOWN MISTER SMYTH NOW AT TWENTY PAST YES I HAVE COME SIR")
    assert words == ["Well-known", "Mr.", "Smyth,", "now", "at", "twenty", "past.", "Yes,", "I", "have", "come", "sir"]
    label = Label("1-2-3", tuple((word, 0.5, 1.0) for word in words), 0.25)
    write_labels(tmp_path / "labels.jsonl", [label])
    assert read_labels(tmp_path / "labels.jsonl") == {"1-2-3": label}


def test_labelling_resumes_and_is_shared_by_processes(tmp_path):
    recording = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "beckett.wav"
    speech_S = np.concatenate([chunk.samples for chunk in read_audio(recording)])
    sound_S = (speech_S * 32767).astype(np.int16)
    utterances = [(f"1-2-{n}", sound_S[: (4 + n) * SAMPLE_RATE], "EVER TRIED EVER FAILED NO MATTER") for n in range(4)]
    whole, seen = tmp_path / "whole" / "labels.jsonl", list[tuple[int, int]]()
    whole.parent.mkdir()
    make_labels(whole, utterances, batch=1, report=lambda progress: seen.append((progress.done, progress.total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def stop(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "labels.jsonl"
    with pytest.raises(KeyboardInterrupt):
        make_labels(path, utterances, batch=1, report=stop)
    assert not path.exists()
    kept = {part: part.stat().st_mtime_ns for part in (tmp_path / "labels.parts").iterdir()}
    assert len(kept) == 2
    other = threading.Thread(target=make_labels, args=(path, utterances), kwargs={"batch": 1, "rank": 1, "ranks": 2})
    other.start()
    made = list[int]()
    make_labels(path, utterances, batch=1, ranks=2, report=lambda _: made.extend(part.stat().st_mtime_ns for part in kept))
    other.join()
    assert set(made) == set(kept.values())  # what was there is not made again
    assert read_labels(path)
    assert path.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "labels.parts").exists()


def test_the_path_follows_the_attention():
    score = np.full((3, 9), -1.0, np.float32)
    score[0, :2] = score[1, 2:7] = score[2, 7:] = 1.0
    assert _path(score).tolist() == [0, 2, 7]
