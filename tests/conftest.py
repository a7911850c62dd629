"""What all tests share: the data folder, real and random models, and the rule for skipped tests."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import zendaya

# The suite runs on machines with few cores, some of them busy: no deadlines, the same examples every time.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=int(os.environ.get("ZENDAYA_EXAMPLES", "60")))
settings.load_profile("suite")
torch.set_num_threads(1)  # one per worker: threads that wait for each other on a busy machine are slower than one
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs: programs the tests interrupt would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

FORBIDDEN = pytest.StashKey()
REQUIRED = "test_page.py"
"""In continuous integration a skip of these tests fails the run; every other skip is printed with its reason."""
DATA = Path(os.environ.get("ZENDAYA_DATA") or Path(__file__).parents[1] / "../shared/data")

MARKS = {
    "browser": ("serve/test_page.py",),
    "integration": (
        "cli/test_bare_install.py", "cli/test_cli.py", "cli/test_stream.py", "cli/test_encode_cli.py", "data/test_encode.py", "docs/",
        "serve/", "research/", "training/", "test_extension.py", "test_parallel.py",
    ),
    "slow": (
        "audit/", "encoders/test_whisper.py", "encoders/test_text.py", "encoders/test_frames.py", "evaluation/test_evaluate.py",
        "evaluation/test_quality.py", "evaluation/test_significance.py", "evaluation/test_simuleval.py", "evaluation/test_omnisteval.py",
        "nn/test_adapter.py", "nn/test_checkpoint.py", "nn/test_model.py", "data/test_store.py", "runtime/test_engine.py",
        "runtime/test_session.py", "runtime/test_policy_session.py", "runtime/test_hold.py", "runtime/test_voice.py",
        "runtime/test_pauses.py",
        "runtime/test_session_properties.py", "runtime/test_batcher.py", "data/corpora/test_multi30k.py", "sources/test_media.py",
        "data/corpora/test_corpora_check.py", "data/corpora/test_activitynet.py", "data/corpora/test_libriheavy.py",
        "encoders/test_whisper_blocks.py", "evaluation/test_comparison.py", "evaluation/test_live_setting.py",
    ),
}  # fmt: skip
"""Marks of whole files and folders; `make quick` leaves all of them out."""


def pytest_ignore_collect(collection_path, config):
    """Files that `-m "not slow …"` leaves out whole are not imported."""
    path, left_out = collection_path.as_posix().partition("/tests/")[2], config.option.markexpr
    return True if any(f"not {mark}" in left_out and path.startswith(places) for mark, places in MARKS.items()) else None


def pytest_collection_modifyitems(items):
    for item in items:
        path = item.path.as_posix().partition("/tests/")[2]
        for mark, places in MARKS.items():
            if path.startswith(places):
                item.add_marker(getattr(pytest.mark, mark))


def forbidden_skips(reports):
    """The skipped tests of a run, as `place: reason`, that continuous integration may not skip."""
    skipped = [f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}" for report in reports]
    return [line for line in skipped if REQUIRED in line]


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None and session.exitstatus == pytest.ExitCode.OK:
        session.config.stash[FORBIDDEN] = forbidden_skips(reporter.stats.get("skipped", []))
        if session.config.stash[FORBIDDEN]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(FORBIDDEN, []):
        terminalreporter.write_line(f"SKIPPED, which fails the run in continuous integration: {line}", red=True)


@pytest.fixture(scope="session")
def data():
    if not DATA.is_dir():
        pytest.skip(f"the real published files are not here: {DATA} (set ZENDAYA_DATA to where they are)")
    return DATA


@pytest.fixture(scope="session")
def simuleval():
    """Run Python code or SimulEval's command in the environment that `make simuleval` makes; the process that ran."""
    python = Path(__file__).parents[1] / ".venv-simuleval" / "bin" / "python"
    if not python.exists():
        pytest.skip("SimulEval is not installed: make simuleval")
    environment = {**os.environ, "PYTHONPATH": str(Path(zendaya.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def run(*words, **options):
        words = [str(python), "-W", "ignore", *map(str, words)]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, **options)

    return run


@pytest.fixture(scope="session")
def tiny_en():
    """The real tiny.en, loaded once: block mode with 1 s blocks, and the transformers encoder inside."""
    from zendaya.encoders.whisper import load_whisper

    return load_whisper("tiny.en")


def _random_encoder(positions):
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=positions, num_mel_bins=80,
        decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, vocab_size=100, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=1,
    )  # fmt: skip
    encoder = WhisperEncoder(config).eval()
    for parameter in encoder.parameters():  # transformers' initial weights are so small that attention hardly matters
        torch.nn.init.normal_(parameter, std=0.2)
    return encoder


@pytest.fixture(scope="session")
def random_whisper():
    """A Whisper encoder of random weights whose span is 2 s, so that spans end quickly."""
    return _random_encoder(100)


@pytest.fixture(scope="session")
def long_whisper():
    """The same with a span of 6 s, in which spans can overlap."""
    return _random_encoder(300)


@pytest.fixture(scope="session")
def voice():
    """Five seconds of something like a voice: harmonics that glide and pulse."""
    time = np.arange(5 * 16_000) / 16_000
    generator = np.random.default_rng(0)
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(3 * time)) / 16_000
    sound = sum(np.sin(k * phase) / k for k in range(1, 12)) * (0.6 + 0.4 * np.sin(9 * time))
    return (0.1 * sound + 0.01 * generator.standard_normal(time.size)).astype(np.float32)


@pytest.fixture(scope="session")
def frontier_of():
    """A hand-written frontier: points of (setting, lag on valid, word errors on valid); on test each lags 0.1 s more."""
    from zendaya.runtime.frontier import Frontier, FrontierData, FrontierPoint, LagFigures

    def figures(lag_s, wer):
        return LagFigures(lag_s=lag_s, lag_p90_s=round(lag_s * 1.5, 6), wer=wer, ratio=wer / 5)

    def make(*points, model="small", model_digest="d" * 64):
        data = {"corpus": "librispeech", "data_digest": "a" * 64, "streams": "b" * 12, "num_streams": 2, "hours": 0.1}
        return Frontier(
            model=model, model_digest=model_digest, version="0", code="c", baseline="tiny.en offline",
            chosen_on=FrontierData(name="LibriSpeech dev-clean", split="valid", **data),
            reported_on=FrontierData(name="LibriSpeech test-clean", split="test", **data),
            points=tuple(
                FrontierPoint(setting=setting, chosen=figures(lag_s, wer), reported=figures(round(lag_s + 0.1, 6), wer + 1))
                for setting, lag_s, wer in points
            ),
        )  # fmt: skip

    return make
