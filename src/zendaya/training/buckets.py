"""Batches of examples of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zendaya.errors import ConfigError

SPREAD = 0.1
"""Random change of the length by which examples are sorted, as a share of it: batches differ from epoch to epoch."""
BIN = 1.2  # sources within this factor of each other count as equally long; among them, texts decide the order


def plan(
    sizes: Sequence[tuple[int, int]], batch_tokens: int, rng: np.random.Generator, *, multiple: int = 1, short_first: bool = False
) -> list[list[int]]:
    """Every example once, in batches of similar length, of at most `batch_tokens` padded source tokens and text rows, in random order.

    The number of batches is a multiple of `multiple`, the micro-batches per optimiser step: the largest batches are halved until it is.
    With `short_first` batches go from short to long, which speeds up learning of alignments (SortaGrad, Amodei et al. 2016).

    >>> rng = np.random.default_rng(0)
    >>> batches = plan([(10, 5), (90, 60), (11, 5), (88, 61)], batch_tokens=400, rng=rng)
    >>> sorted(sorted(batch) for batch in batches)
    [[0, 2], [1, 3]]
    """
    size = np.array(sizes, np.int64).reshape(-1, 2)
    if size.shape[0] < multiple:
        raise ConfigError(f"a step needs at least {multiple} examples, one per micro-batch: got {size.shape[0]}; lower accumulate")
    if (largest := int(size.sum(1).max())) > batch_tokens:
        raise ConfigError(f"batch_tokens must hold the longest example, {largest} source tokens and text rows: got {batch_tokens}")
    source_key, rows_key = (np.log(np.maximum(size, 1)) + rng.uniform(-SPREAD, SPREAD, size.shape)).T
    order = np.lexsort((rows_key, np.floor(source_key / np.log(BIN))))
    batches: list[list[int]] = []
    batch: list[int] = []
    source = rows = 0
    for index in order.tolist():
        source, rows = max(source, int(size[index, 0])), max(rows, int(size[index, 1]))
        if (len(batch) + 1) * (source + rows) > batch_tokens:
            batches.append(batch)
            batch, (source, rows) = [], (int(size[index, 0]), int(size[index, 1]))
        batch.append(index)
    batches.append(batch)
    while len(batches) % multiple:
        largest_batch = max(batches, key=len)
        if len(largest_batch) == 1:
            raise ConfigError(
                f"{len(batches)} batches of one example each are not a multiple of the {multiple} micro-batches per optimiser step: "
                "lower accumulate, or raise batch_tokens"
            )
        batches.remove(largest_batch)
        batches += [largest_batch[::2], largest_batch[1::2]]
    if short_first:
        return sorted(batches, key=lambda batch: int(size[batch].sum(1).max()))
    return [batches[place] for place in rng.permutation(len(batches))]
