"""Our paired bootstrap of corpus BLEU beside sacreBLEU's own, on as many clips as Charades-STA tests (3,720) and as many resamples."""

from __future__ import annotations

import argparse
import json
import random
import time

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from zendaya.evaluation.metrics.significance import paired_bootstrap, statistics

WORDS = [f"word{n}" for n in range(200)]


def texts(num_clips: int) -> tuple[list[str], list[str], list[str]]:
    """References, and two systems that get a word wrong now and then."""
    draw = random.Random(0)
    references = [draw.choices(WORDS, k=draw.randint(4, 12)) for _ in range(num_clips)]

    def system(wrong: float) -> list[str]:
        return [" ".join(draw.choice(WORDS) if draw.random() < wrong else word for word in words) for words in references]

    return [" ".join(words) for words in references], system(0.30), system(0.31)


def main(arguments: list[str] | None = None) -> None:
    """Print both differences, p and times, those of the processor: a busy machine changes them little."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=3720)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    references, one, other = texts(options.clips)

    began = time.process_time()
    a, b = (statistics("bleu", system, [[reference] for reference in references]) for system in (one, other))
    counted = time.process_time()
    ours = paired_bootstrap(a, b, resamples=options.resamples)
    ours_s = time.process_time() - counted

    metric = BLEU(references=[references])
    named = [("b", other), ("a", one)]
    begins = time.process_time()
    _, scores = PairedTest(named, {"BLEU": metric}, references=None, test_type="bs", n_samples=options.resamples)()
    theirs_s = time.process_time() - begins
    baseline, system = scores["BLEU"]
    found = {
        "clips": options.clips, "resamples": options.resamples, "counting_s": counted - began, "ours_s": ours_s, "sacrebleu_s": theirs_s,
        "ours": [ours.value, ours.low, ours.high, ours.p], "sacrebleu": [system.score - baseline.score, system.p_value],
    }  # fmt: skip
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.clips} clips, {options.resamples} resamples of corpus BLEU for two systems; seconds of one core")
    print(
        f"ours       {ours_s:6.2f} s, after {counted - began:.2f} s of counting n-grams: {ours.value:+.2f} "
        f"[{ours.low:+.2f}, {ours.high:+.2f}], p = {ours.p:.3f}"
    )
    print(f"sacreBLEU  {theirs_s:6.2f} s, counting included: {system.score - baseline.score:+.2f}, p = {system.p_value:.3f}")


if __name__ == "__main__":
    main()
