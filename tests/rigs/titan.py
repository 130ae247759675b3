"""torchtitan's Trainer on a CPU, with the loader of docs/guides/language.md; outside CI, as its packages take 2 GB.

Run as `python tests/rigs/titan.py STEPS` in the folder where that page was followed, with torchtitan 0.3 and what it
imports: tensorboard, triton, spmd_types==0.2.3, tyro, datasets. A second run with more steps resumes the first.

FlexAttention has no backward pass on a CPU. So the Trainer trains with plain causal attention, and FlexAttention is run
forward: the scores of a document in a row must be those of the document alone.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.getcwd())  # of titan_tokens.py
os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")

import torch
from torchtitan.tools import utils


class Cpu:
    """What torchtitan asks of a device beside what torch.cpu has."""

    total_memory = 2**34

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, *device: Any) -> str:
        return "CPU"

    def get_device_properties(self, *device: Any) -> Cpu:
        return self

    def memory_stats(self, *device: Any) -> dict[str, int]:
        return defaultdict(int)

    def current_device(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


utils.device_type, utils.device_module = "cpu", Cpu()
utils.get_local_device = lambda: torch.device("cpu")
torch.distributed.set_timeout = lambda *timeout: None  # which torch 2.13 lacks

from titan_tokens import TokensDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

DATA = TokensDataLoader.Config(dataset_path="tokens.shards.json")


class NoTokenizer(BaseTokenizer):
    """Of data that are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, *, tokenizer_path: str):
        super().__init__()

    def encode(self, *text: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *ids: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def check_documents() -> None:
    """Compare the scores of a document in a row with those of the document alone, by the model's own FlexAttention."""
    loader = DATA.build(dp_rank=0, dp_world_size=1, tokenizer=None, seq_len=128, local_batch_size=2)
    row, _ = next(iter(loader))
    model = llama3_debugmodel().model_spec.model.build()

    def scores(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        masks = model.get_attention_masks(positions=positions)
        return model(ids, positions=positions, attention_masks=masks)

    with torch.no_grad():
        model.init_weights()
        together = scores(row["input"], row["positions"])
        _, begin, end, *_ = [*(row["positions"][0] == 0).nonzero().flatten().tolist(), len(row["input"][0])]
        alone = scores(row["input"][:, begin:end], row["positions"][:, begin:end])
    torch.testing.assert_close(together[:, begin:end], alone, rtol=1e-3, atol=1e-3)
    print(f"a document of {end - begin} tokens in a row of {len(row['input'][0])} is as if it were alone")


def train(steps: int) -> None:
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer, config.dump_folder = DATA, NoTokenizer.Config(), "titan"
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 256, 4, steps
    config.training.disable_cuda_graphs, config.validator.enable = True, False
    config.checkpoint.enable, config.checkpoint.interval = True, 5
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = config.build()
    trainer.train()
    trainer.close()
    print(f"{steps} steps, after row {trainer.dataloader.state_dict()['position']}")


if __name__ == "__main__":
    init_logger()
    check_documents()
    train(int(sys.argv[1]))
