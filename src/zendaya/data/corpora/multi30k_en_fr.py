"""Multi30k, English to French."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zendaya.data.corpora import multi30k

CORPUS = replace(
    multi30k.CORPUS, name="multi30k-en-fr", task="translation of sentences, English to French",
    files=partial(multi30k.files, target="fr"), clips=partial(multi30k.clips, target="fr"),
)  # fmt: skip
