"""Our latency measures beside SimulEval's scorers on random traces: the largest difference of each.

SimulEval is not a dependency: run this where it is installed (`pip install simuleval==1.1.4`, best in an environment of its own).
"""

from __future__ import annotations

import random
from types import SimpleNamespace

from simuleval.evaluator.scorers import latency_scorer

from zendaya.evaluation.metrics import latency

SEED, TRACES = 0, 3000
PAIRS = {
    "AL": (latency_scorer.ALScorer, latency.average_lagging),
    "LAAL": (latency_scorer.LAALScorer, latency.length_adaptive_average_lagging),
    "AP": (latency_scorer.APScorer, latency.average_proportion),
    "DAL": (latency_scorer.DALScorer, latency.differentiable_average_lagging),
}

draw = random.Random(SEED)
worst = dict.fromkeys(PAIRS, 0.0)
for _ in range(TRACES):
    source, target = draw.randint(1, 200), draw.randint(1, 60)
    delays = sorted(draw.randint(0, source + draw.choice([0, 0, 5])) for _ in range(draw.randint(1, 80)))
    instance = SimpleNamespace(delays=delays, elapsed=delays, reference="", reference_length=target, source_length=source)
    for name, (scorer, ours) in PAIRS.items():
        worst[name] = max(worst[name], abs(scorer().compute(instance) - ours(delays, source=source, target=target)))
print(f"{TRACES} traces, seed {SEED}: largest difference " + ", ".join(f"{name} {value:.1e}" for name, value in worst.items()))
