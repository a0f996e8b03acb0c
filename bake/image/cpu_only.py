"""Stops a build whose torch is a CUDA build: some three gigabytes that nothing in a sidecar uses."""

import importlib
import sys

torch = importlib.import_module("torch")
if torch.version.cuda:
    sys.exit(
        f"torch {torch.__version__} is a CUDA build, and the image computes on the CPU; "
        "give the address of PyTorch's index of CPU wheels as TORCH_INDEX"
    )
