"""The engine beside its peers: `zendaya bench --peers` as a script, for a checkout.

python benchmarks/engine.py [--preset libriheavy] [--streams 8,32,64] [--live 500] [--rounds 5] [--threads 2] [--peers] [--json FILE]

The peers are installed beside the package: pip install transformers ctranslate2 onnxruntime onnx onnxscript
"""

from zendaya.cli import app

if __name__ == "__main__":
    import sys

    app(["bench", *sys.argv[1:]])
