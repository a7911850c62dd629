"""Published numbers from the paper's tables: Mehmood and Javed, *Reading Less While Writing*. Scores are fractions."""

from __future__ import annotations

from dataclasses import dataclass

CORPORA = {"charades-sta": "Charades-STA", "activitynet": "ActivityNet", "libriheavy": "LibriHeavy"}
"""Recipes and their corpora's names in the paper."""

SETUP_ROWS = ("Modality", "Frozen encoder", "Token rate", "Feature dim.", "F (=W)", "N (=N_max)", "ρ = F/N", "Regime")
SETUP = {
    "charades-sta": ("video", "CLIP B/32", "3 fps", "512", "55", "20", "2.75", "source-dense"),
    "activitynet": ("video", "C3D fc7", "pre-extracted", "500 (PCA)", "135", "40", "3.38", "source-dense"),
    "libriheavy": ("audio", "Whisper-base", "≈3 /s", "512", "100", "165", "0.61", "text-dense"),
}
"""Table 1 (tab:setup)."""


@dataclass(frozen=True)
class PublishedOffline:
    """A row of Table 2 (tab:fixed)."""

    bleu_base: float
    bleu: float
    gamma: float
    meteor_base: float
    meteor: float
    rel: str
    exposure: float


FIXED = {
    "charades-sta": PublishedOffline(0.0336, 0.0402, 0.30, 0.2096, 0.2115, "+19.6%", 0.77),
    "activitynet": PublishedOffline(0.0143, 0.0210, 0.10, 0.1139, 0.1264, "+46.9%", 0.91),
    "libriheavy": PublishedOffline(0.2125, 0.2143, 0.30, 0.5627, 0.5608, "+0.8%", 0.77),
}

STREAM = {
    "charades-sta": {
        "z-1.5": (0.0367, 0.2070, 7.1), "z-0.2": (0.0502, 0.2279, 17.0), "w-10": (0.0344, 0.2201, 8.0), "w-20": (0.0367, 0.1989, 16.2),
        "w-40": (0.0477, 0.2210, 22.7),
    },
    "activitynet": {
        "z-1.5": (0.0314, 0.1534, -3.0), "z-0.4": (0.0345, 0.1587, 15.3), "w-5": (0.0245, 0.1362, -3.7), "w-10": (0.0330, 0.1461, 0.4),
    },
    "libriheavy": {
        "z-1.0": (0.1363, 0.4255, 1.7), "z-0.2": (0.1610, 0.4751, 18.5), "w-10": (0.0939, 0.3590, 4.3), "w-40": (0.1628, 0.4899, 32.1),
    },
}  # fmt: skip
"""Table 3 (tab:stream): BLEU-4, METEOR and AL of each anchor."""

PAIRS = {
    "charades-sta": ("z-0.2 vs w-40", (0.0024, -0.003, 0.008), (0.0070, 0.001, 0.013)),
    "activitynet": ("z-0.4 vs w-10", (0.0014, -0.002, 0.005), (0.0127, 0.008, 0.018)),
    "libriheavy": ("z-1.0 vs w-10", (0.0426, 0.034, 0.052), (0.0668, 0.052, 0.082)),
}
"""Table 4 (tab:ci): difference and interval of BLEU-4 and METEOR."""

INTERVALS = {
    "charades-sta": {
        "BLEU-4": (0.0401, 0.0359, 0.0443, 0.0337, 0.0297, 0.0384, 0.0064, 0.0013, 0.0113, "0.026"),
        "METEOR": (0.2115, 0.2062, 0.2166, 0.2096, 0.2043, 0.2151, 0.0019, -0.0041, 0.0080, ""),
    },
    "activitynet": {
        "BLEU-4": (0.0210, 0.0176, 0.0246, 0.0142, 0.0116, 0.0168, 0.0068, 0.0028, 0.0107, "<0.001"),
        "METEOR": (0.1264, 0.1215, 0.1310, 0.1139, 0.1095, 0.1185, 0.0126, 0.0071, 0.0179, ""),
    },
    "libriheavy": {
        "BLEU-4": (0.2142, 0.2008, 0.2280, 0.2123, 0.1979, 0.2260, 0.0019, -0.0039, 0.0079, "0.560"),
        "METEOR": (0.5608, 0.5432, 0.5787, 0.5627, 0.5446, 0.5800, -0.0019, -0.0099, 0.0066, ""),
    },
}
"""Table A1 (tab:supp-ci): score, interval, baseline, interval, difference, interval, p."""

SEEDED: dict[str, dict[float, tuple[tuple[float, float], tuple[float, float]]]] = {
    "charades-sta": {
        0.0: ((0.0322, 0.0010), (0.2018, 0.0106)), 0.1: ((0.0391, 0.0070), (0.2160, 0.0122)), 0.2: ((0.0409, 0.0016), (0.2168, 0.0050)),
        0.3: ((0.0432, 0.0053), (0.2191, 0.0107)), 0.4: ((0.0352, 0.0040), (0.2000, 0.0069)), 0.7: ((0.0410, 0.0013), (0.2098, 0.0077)),
        1.0: ((0.0300, 0.0011), (0.1911, 0.0032)),
    },
    "activitynet": {
        0.0: ((0.0165, 0.0025), (0.1150, 0.0046)), 0.1: ((0.0145, 0.0028), (0.1123, 0.0053)), 0.2: ((0.0170, 0.0027), (0.1156, 0.0051)),
        0.3: ((0.0159, 0.0023), (0.1155, 0.0065)), 0.4: ((0.0194, 0.0015), (0.1210, 0.0016)), 0.7: ((0.0197, 0.0039), (0.1225, 0.0053)),
        1.0: ((0.0174, 0.0028), (0.1193, 0.0023)),
    },
    "libriheavy": {
        0.0: ((0.2047, 0.0075), (0.5496, 0.0113)), 0.1: ((0.2049, 0.0045), (0.5525, 0.0054)), 0.2: ((0.2070, 0.0042), (0.5533, 0.0095)),
        0.3: ((0.2088, 0.0033), (0.5522, 0.0049)), 0.4: ((0.2074, 0.0050), (0.5476, 0.0028)), 0.7: ((0.2033, 0.0020), (0.5422, 0.0017)),
        1.0: ((0.1255, 0.0060), (0.4117, 0.0080)),
    },
}  # fmt: skip
"""Table A3 (tab:supp-seeded): mean and standard deviation over three seeds of BLEU-4 and METEOR, by γ; 0 is γ→0."""

SEEDED_BOLD: dict[str, dict[str, tuple[float, ...]]] = {
    "charades-sta": {"BLEU-4": (0.2, 0.3, 0.7), "METEOR": ()},
    "activitynet": {"BLEU-4": (0.7,), "METEOR": (0.4, 0.7)},
    "libriheavy": {"BLEU-4": (), "METEOR": ()},
}
"""The γ that Table A3 prints in bold."""
