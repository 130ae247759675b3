"""Lets torchvision be imported beside a torch without CUDA, for peers that need it or whose users would take it."""

from __future__ import annotations

import torch

if torch.version.cuda is None:  # PyPI's torchvision has no operators then, but its import names two of them
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
