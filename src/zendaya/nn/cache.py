"""The key-value cache of an incremental decode. Shape suffixes as in decoder.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values (B, A, T, K) per layer, with room for more rows."""

BLOCK = 16
"""Source tokens per projected block; a token always stands at the same place of its block: see `Decoder.read`."""
FIRST_ROWS = 32
"""Rows a layer has room for at first."""


@dataclass
class Cache:
    """The state of an incremental decode of `batch` streams in step: the projected source, keys and values of the text rows."""

    batch: int
    num_source: int = 0
    num_rows: int = 0
    cross: KeysValues = field(default_factory=list)
    """Of the source tokens, for the cross-attention of each text layer."""
    text: KeysValues = field(default_factory=list)
    """Of the text rows, for the self-attention of each text layer."""
    context: KeysValues = field(default_factory=list)
    """Of the source tokens, for the self-attention of each source layer."""
    pending_BTE: Tensor | None = None
    """Raw tokens of the block that is not yet full."""
    unreadable_B: Tensor | None = None
    """Streams whose source layers have met an unreadable token in an earlier block."""

    def clone(self) -> Cache:
        """An independent copy."""

        def copies(pairs: KeysValues) -> KeysValues:
            return [(k.clone(), v.clone()) for k, v in pairs]

        return Cache(
            batch=self.batch, num_source=self.num_source, num_rows=self.num_rows,
            cross=copies(self.cross), text=copies(self.text), context=copies(self.context),
            pending_BTE=None if self.pending_BTE is None else self.pending_BTE.clone(),
            unreadable_B=None if self.unreadable_B is None else self.unreadable_B.clone(),
        )  # fmt: skip

    def forget_source(self) -> None:
        """Drop the source and keep the text rows: the next tokens read are those of a new window."""
        self.num_source = 0
        self.cross, self.context = [], []
        self.pending_BTE = self.unreadable_B = None

    def keep_source(self, count: int) -> None:
        """Withdraw the source tokens after the first `count`, and a few before: the next token to read is that at `num_source`.

        A block is projected whole, so its first tokens are read again with the others. After an unreadable token all are.
        """
        if count >= self.num_source:
            return
        unreadable = self.unreadable_B is not None and bool(self.unreadable_B.any())
        self.num_source = 0 if unreadable else max(0, count) // BLOCK * BLOCK
        self.pending_BTE = None
        self.unreadable_B = None if unreadable else self.unreadable_B

    def forget_text(self) -> None:
        """Drop the text rows and keep the source."""
        self.num_rows = 0
        self.text = []


def write_rows(store: KeysValues, layer: int, start: int, keys_values: tuple[Tensor, Tensor]) -> None:
    """Put keys and values at rows `start …` of a layer; its room grows by doubling, so that memory follows what was read."""
    k_BATK, _ = keys_values
    end = start + k_BATK.shape[2]
    if layer == len(store):
        store.append((k_BATK[:, :, :0], k_BATK[:, :, :0]))
    old = store[layer]
    if end > old[0].shape[2]:
        room = max(end, 2 * old[0].shape[2], FIRST_ROWS)
        grown = tuple(k_BATK.new_zeros(*k_BATK.shape[:2], room, k_BATK.shape[3]) for _ in range(2))
        for new, was in zip(grown, old, strict=True):
            new[:, :, : was.shape[2]] = was
        store[layer] = (grown[0], grown[1])
    for row_store, rows in zip(store[layer], keys_values, strict=True):
        row_store[:, :, start:end] = rows
