"""On the PYTHONPATH of a real vLLM in tests: packages that PyPI builds for another torch than
the one for CPUs, and that cannot be imported beside it."""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)
