"""Builds the native engine with the package; without a C compiler the install succeeds without it."""

import os
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/zendaya/runtime/engine/native")
WINDOWS = os.name == "nt"
# No contraction to fused multiply-add: a kernel gives the same bits with any compiler.
FLAGS = ["-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "zendaya.runtime.engine._native",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, [*NATIVE.glob("*.h"), *NATIVE.glob("*.inc")])),
            extra_compile_args=[] if WINDOWS else FLAGS,
            extra_link_args=[] if WINDOWS else ["-pthread"],
            optional=True,
        )
    ]
)
