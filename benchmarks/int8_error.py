"""How far int8 is from float32 on the shipped model: the divergence of the next token's distribution.

python benchmarks/int8_error.py FOLDER [--clips 40]

FOLDER is LibriSpeech's; utterances of its valid split, whole, teacher-forced on their references.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from zendaya.data.corpora import registry as corpora
from zendaya.runtime.engine import NativeEngine
from zendaya.runtime.loading import load_adapted
from zendaya.sources.media import read_audio


def main() -> None:
    """Print the mean divergence in nats, and how often the likeliest token is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    adapted = load_adapted("tiny.en-dial")
    model, encoder = adapted.model, adapted.encoder
    reading = corpora.read("librispeech", options.folder)
    valid = [clip for clip in reading.usable if clip.split == "valid" and clip.duration_s < 29]
    examples = []
    for clip in valid[:: max(1, len(valid) // options.clips)]:
        samples_S = np.concatenate([chunk.samples for chunk in read_audio(options.folder / clip.media)])
        state = encoder.start()
        source_TE = torch.cat([encoder.read(state, samples_S).values_TE, encoder.finish(state).values_TE])
        assert model.tokenizer is not None
        examples.append((source_TE, model.tokenizer.encode(f" {clip.references[0].capitalize()}")))

    def logits(engine: NativeEngine, source_TE: torch.Tensor, ids: list[int]) -> torch.Tensor:
        cache = engine.start()
        engine.read(cache, source_TE[None])
        rows = [engine.prefill(cache, torch.tensor([model.config.framing.prompt]), len(source_TE))]
        return torch.cat([*rows, *(engine.step(cache, torch.tensor([token]), len(source_TE)) for token in ids)]).log_softmax(-1)

    exact = NativeEngine(model.decoder, threads=1)
    expected = [logits(exact, *example) for example in examples]
    steps = sum(map(len, expected))
    print(f"adapter sha256:{adapted.digest[:16]}, data sha256:{reading.digest[:16]}, {len(examples)} utterances, {steps} steps")
    engine = NativeEngine(model.decoder, precision="int8", threads=1)
    nats, others = 0.0, 0
    for example, wanted_NV in zip(examples, expected, strict=True):
        found_NV = logits(engine, *example)
        nats += float((wanted_NV.exp() * (wanted_NV - found_NV)).sum())
        others += int((wanted_NV.argmax(-1) != found_NV.argmax(-1)).sum())
    print(f"{nats / steps:.6f} nats a step; another likeliest token in {others} of {steps} steps")


if __name__ == "__main__":
    main()
