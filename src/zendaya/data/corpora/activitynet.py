"""ActivityNet Captions (Krishna et al. 2017): a JSON object a split, with duration, timestamps and sentences of each video."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zendaya.data.corpora.base import CAPTION_METRICS, Corpus
from zendaya.data.published import (
    Malformed,
    as_list,
    as_name,
    as_number,
    as_object,
    checked,
    clean_references,
    found,
    get,
    json_object,
    report,
    snippet,
    unreadable,
)
from zendaya.records import Clip, Problem

NAME = "activitynet"
SPLITS = ("train", "val_1", "val_2")
"""val_1 and val_2 are two people's annotations of the same videos."""
NEEDS = "train.json, val_1.json and val_2.json in one folder; features: sub_activitynet_v1-3.c3d.hdf5"
WHERE = (
    "sentences: https://cs.stanford.edu/people/ranjaykrishna/densevid/; C3D features: http://activity-net.org/challenges/2016/download.html"
)


def files(path: Path) -> list[Path]:
    """The published files in the folder."""
    return found(path, [f"{split}.json" for split in SPLITS], "the ActivityNet captions", WHERE)


def clips(path: Path, problems: list[Problem]) -> Iterator[Clip]:
    """One clip a sentence, in file order."""
    published = files(path)
    splits = {file.name.removesuffix(".gz").removesuffix(".json"): file for file in published}
    for split in SPLITS:
        if split not in splits:
            report(problems, "missing-split", f"{split}.json", "no such file")
    for split, file in splits.items():
        num_clips = 0
        for video, record in json_object(file, problems).items():
            for clip in _video_clips(split, video, record, file.name, problems):
                num_clips += 1
                yield clip
        if not num_clips:
            raise unreadable(file, "an object of videos with duration, timestamps and sentences", problems)


def _video_clips(split: str, video: str, value: Any, name: str, problems: list[Problem]) -> Iterator[Clip]:
    where = f"{name}:{snippet(video)}"
    try:
        as_name(video, "the video")
        record = as_object(value, "the annotation")
        timestamps, sentences = as_list(get(record, "timestamps"), "timestamps"), as_list(get(record, "sentences"), "sentences")
    except Malformed as error:
        report(problems, "malformed", where, str(error))
        return
    stream_s = None
    try:
        stream_s = as_number(get(record, "duration"), "duration")
    except Malformed as error:
        report(problems, "unknown-length", where, str(error))
    if len(timestamps) != len(sentences):
        report(problems, "unpaired", where, f"{len(timestamps)} timestamps and {len(sentences)} sentences: the last of the longer are left")
    last_start = 0.0
    for number, (times, sentence) in enumerate(zip(timestamps, sentences, strict=False), 1):
        where = f"{name}:{video}[{number}]"
        try:
            if len(as_list(times, "a timestamp")) != 2:
                raise Malformed(f"a timestamp must be a start and an end: got {snippet(times)}")
            clip = Clip(
                corpus=NAME,
                id=f"{video}/{number}",
                split=split,
                stream=video,
                references=clean_references([sentence], where, problems),
                start_s=as_number(times[0], "start"),
                end_s=as_number(times[1], "end"),
                media=video,
                stream_s=stream_s,
            )
        except Malformed as error:
            report(problems, "malformed", where, str(error))
            continue
        if clip.start_s < last_start:
            report(problems, "out-of-order", where, f"starts at {clip.start_s} s, the one before at {last_start} s")
        last_start = clip.start_s
        yield checked(clip, where, problems)


CORPUS = Corpus(
    name=NAME, task="captioning of video segments", modality="video", metrics=CAPTION_METRICS, needs=NEEDS, where=WHERE,
    licence="research use", files=files, clips=clips,
)  # fmt: skip
