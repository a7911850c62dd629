"""The native engine, built with the package; an install without a C compiler goes on without it."""

import os
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/zendaya/engine/native")
WINDOWS = os.name == "nt"
# Products and sums are rounded as they are written: the same kernel gives the same bits wherever it was compiled.
FLAGS = ["-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "zendaya.engine._native",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, [*NATIVE.glob("*.h"), *NATIVE.glob("*.inc")])),
            extra_compile_args=[] if WINDOWS else FLAGS,
            extra_link_args=[] if WINDOWS else ["-pthread"],
            optional=True,
        )
    ]
)
