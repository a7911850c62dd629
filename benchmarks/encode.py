"""How much faster than real time Whisper's block mode encodes a long stream on one core, and whether its memory stays constant.

python benchmarks/encode.py [--minutes 10] [--block-s 1.0] [--model tiny.en]
"""

import argparse
import resource
import time

import numpy as np
import torch

from zendaya.encoders.whisper import SAMPLE_RATE, load_whisper


def main() -> None:
    """Stream coloured noise in chunks of 0.1 s and print the factor and the memory at each tenth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--block-s", type=float, default=1.0)
    parser.add_argument("--pool", type=int, default=15)
    parser.add_argument("--model", default="tiny.en")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encoder = load_whisper(arguments.model, mode="block", block_s=arguments.block_s, pool=arguments.pool)
    generator = np.random.default_rng(0)
    noise = np.convolve(generator.standard_normal(61 * SAMPLE_RATE), np.ones(8) / 80, "same").astype(np.float32)
    state, chunk, total = encoder.start(), SAMPLE_RATE // 10, int(arguments.minutes * 60 * SAMPLE_RATE)
    num_tokens, slowest_s, marks = 0, 0.0, list[int]()
    begun = time.perf_counter()
    for first in range(0, total, chunk):
        place = first % (60 * SAMPLE_RATE)
        before = time.perf_counter()
        num_tokens += len(encoder.read(state, noise[place : place + chunk]))
        slowest_s = max(slowest_s, time.perf_counter() - before)
        if first % (total // 10) < chunk:
            marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    num_tokens += len(encoder.finish(state))
    spent_s = time.perf_counter() - begun
    print(f"{encoder.traits.name}: {arguments.minutes:g} min, {num_tokens} tokens, one thread")
    print(f"faster than real time: {arguments.minutes * 60 / spent_s:.1f}×; slowest chunk {1000 * slowest_s:.0f} ms")
    print(f"peak memory at each tenth, MiB: {' '.join(map(str, marks))}")


if __name__ == "__main__":
    main()
