"""The loudest log-mel value of LibriSpeech's training clips: what block mode's fixed ceiling stands for.

Run as `python benchmarks/whisper_ceiling.py FOLDER`, the folder with LibriSpeech as `zendaya corpora check librispeech FOLDER` takes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from transformers import WhisperFeatureExtractor

from zendaya.data.corpora.registry import read
from zendaya.sources.media import read_audio

EVERY = 40

folder = Path(sys.argv[1])
reading = read("librispeech", folder)
extractor = WhisperFeatureExtractor()
window = np.hanning(401)[:-1]
maxima = []
for clip in [clip for clip in reading.usable if clip.split == "train"][::EVERY]:
    samples = np.concatenate([chunk.samples for chunk in read_audio(folder / clip.media)])
    frames = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160] * window
    energy = (np.abs(np.fft.rfft(frames)) ** 2) @ extractor.mel_filters
    maxima.append(float(np.log10(energy.max())))
low, median, high = np.percentile(maxima, [5, 50, 95])
print(f"{len(maxima)} clips of train, data sha256:{reading.digest[:16]}: median {median:.2f} (5-95 %: {low:.2f}-{high:.2f})")
