"""The native engine, built with the package; an install without a C compiler goes on without it."""

import os
from glob import glob

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]

setup(
    ext_modules=[
        Extension(
            "zendaya.engine._native",
            sources=sorted(glob("src/zendaya/engine/native/*.c")),
            depends=sorted(glob("src/zendaya/engine/native/*.h") + glob("src/zendaya/engine/native/*.inc")),
            extra_compile_args=[] if os.name == "nt" else FLAGS,
            extra_link_args=[] if os.name == "nt" else ["-pthread"],
            optional=True,
        )
    ]
)
