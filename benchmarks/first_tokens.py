"""How sure the shipped speech model is of the first token of a window's text: of speech, and of sounds that are none.

python benchmarks/first_tokens.py FOLDER [--chapters 10] [--utterances 8] [--seconds 30] [--json]

FOLDER holds LibriSpeech as `manifest.jsonl`; chapters of its `valid` split are drawn (seed 1). The other sounds are made here (seed 0) and
decoded with the voice gate and its guard off. `START_SHARE` in `zendaya.runtime.token_rules` was chosen by this.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zendaya import DecodeOptions, Pipeline, PowerLaw
from zendaya.runtime.engine import engine_for
from zendaya.runtime.loading import load_live
from zendaya.sources.live import at_once
from zendaya.sources.media import SAMPLE_RATE, read_audio


def chapters(folder: Path, count: int, utterances: int) -> Iterator[np.ndarray]:
    """The first utterances of some chapters, one after another."""
    found = dict[str, list[Path]]()
    for line in (folder / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["split"] == "valid":
            found.setdefault(row["id"].rsplit("-", 1)[0], []).append(folder / row["audio"])
    for paths in random.Random(1).sample(list(found.values()), min(count, len(found))):
        yield np.concatenate([chunk.samples for path in paths[:utterances] for chunk in read_audio(path)])


def sounds(seconds: float) -> dict[str, np.ndarray]:
    """Sounds without speech."""
    time_S = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    white_S = np.random.default_rng(0).standard_normal(time_S.size)
    gain = 1 / np.sqrt(np.maximum(np.fft.rfftfreq(time_S.size, 1 / SAMPLE_RATE), 20))
    pink_S = np.fft.irfft(np.fft.rfft(white_S) * gain, time_S.size)
    chord_S = sum(np.sin(2 * np.pi * tone * k * time_S) / k for tone in (220, 277.2, 329.6) for k in (1, 2, 3))
    made = {
        "silence": 0 * time_S,
        "pink noise": 0.05 * pink_S / pink_S.std(),
        "hum": sum(0.1 / k * np.sin(2 * np.pi * 50 * k * time_S) for k in (1, 2, 3, 5)),
        "chords": 0.1 * chord_S * np.exp(-2.5 * (time_S % 0.6)),
        "claps": 0.1 * white_S * (np.sin(6 * np.pi * time_S) > 0.6),
    }
    return {name: sound_S.astype(np.float32) for name, sound_S in made.items()}


def main() -> None:
    """Print the lowest probabilities per sound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chapters", type=int, default=10)
    parser.add_argument("--utterances", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, encoder = load_live("tiny.en-dial")
    engine = engine_for(model)

    def firsts(sound_S: np.ndarray, voice: Any) -> list[float]:
        """The probability of each window's first token."""
        pipeline, found = Pipeline.open(model, encoder, DecodeOptions(schedule=PowerLaw(0.5), voice=voice), engine=engine), list[float]()
        choose = pipeline.session._context.rules.choose

        def watched(logits_V: torch.Tensor, text: Any, **speech: int) -> int:
            token = choose(logits_V, text, **speech)
            if not text and token != model.config.framing.end:
                found.append(float(logits_V.softmax(-1)[token]))
            return token

        pipeline.session._context.rules.choose = watched  # type: ignore[method-assign]
        list(pipeline.run(at_once([sound_S])))
        return found

    table = {name: sorted(firsts(sound_S, "off")) for name, sound_S in sounds(options.seconds).items()}
    heard = chapters(options.folder, options.chapters, options.utterances)
    table["speech"] = sorted(first for sound_S in heard for first in firsts(sound_S, "gate"))
    for name, found in table.items():
        print(json.dumps({name: found}) if options.json else f"{name}: {len(found)} windows, {', '.join(f'{p:.3f}' for p in found[:8])} …")


if __name__ == "__main__":
    main()
