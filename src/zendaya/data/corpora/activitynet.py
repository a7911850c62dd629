"""ActivityNet Captions (Krishna et al. 2017): one JSON object per split, with duration, timestamps and sentences of each video."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import Fields, Malformed, as_number, checked, clean_references, found, json_items, report, skipping, unreadable
from zendaya.records import Clip, Problem

NAME = "activitynet"
SPLITS = ("train", "val_1", "val_2")
"""val_1 and val_2 are two people's annotations of the same videos."""
WHERE = (
    "sentences: https://cs.stanford.edu/people/ranjaykrishna/densevid/; C3D features: http://activity-net.org/challenges/2016/download.html"
)


def files(path: Path) -> list[Path]:
    """The published files in the folder."""
    return found(path, [f"{split}.json" for split in SPLITS], "the ActivityNet captions", WHERE)


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip per sentence, in file order."""
    splits = {file.name.removesuffix(".gz").removesuffix(".json"): file for file in files(path)}
    for split in SPLITS:
        if split not in splits:
            report(problems, "missing-split", f"{split}.json", "no such file")
    for split, file in splits.items():
        num_clips = 0
        for where, video, record in json_items(file, problems):
            with skipping(problems, where):
                for clip in _video_clips(split, video, record, where, problems):
                    num_clips += 1
                    yield clip
        if not num_clips:
            raise unreadable(file, "an object of videos with duration, timestamps and sentences", problems)


def _video_clips(split: str, video: str, record: Fields, where: str, problems: list[Problem]) -> Iterator[Clip]:
    timestamps, sentences = record.array("timestamps"), record.array("sentences")
    name, stream_s, last_start_s = where.partition(":")[0], None, 0.0
    try:
        stream_s = record.number("duration")
    except Malformed as error:
        report(problems, "unknown-length", where, str(error))
    if len(timestamps) != len(sentences):
        detail = f"{len(timestamps)} timestamps and {len(sentences)} sentences: the surplus at the end is left out"
        report(problems, "unpaired", where, detail)
    for number, (times, sentence) in enumerate(zip(timestamps, sentences, strict=False), 1):
        where = f"{name}:{video}[{number}]"
        with skipping(problems, where):
            if not isinstance(times, list) or len(times) != 2:
                raise Malformed("a timestamp must be a start and an end", times)
            clip = Clip(
                corpus=NAME, id=f"{video}/{number}", split=split, stream=video, media=video, stream_s=stream_s,
                references=clean_references([sentence], where, problems), start_s=as_number(times[0], "start"),
                end_s=as_number(times[1], "end"),
            )  # fmt: skip
            if clip.start_s < last_start_s:
                report(problems, "out-of-order", where, f"starts at {clip.start_s} s, the one before at {last_start_s} s")
            last_start_s = clip.start_s
            yield checked(clip, where, problems)


CORPUS = Corpus(
    name=NAME, task="captioning of video segments", modality="video", metrics=CAPTION_METRICS, where=WHERE, licence="research use",
    needs="train.json, val_1.json and val_2.json in one folder; features: sub_activitynet_v1-3.c3d.hdf5", files=files, clips=clips,
)  # fmt: skip
