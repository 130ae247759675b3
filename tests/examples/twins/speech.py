"""Speech in batches of at most a minute, with lhotse, from the folder of a Shar."""

import sys
from pathlib import Path

import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, IterableDatasetWrapper
from lhotse.dataset.collation import collate_audio
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    def __getitem__(self, cuts):
        sounds, lengths = collate_audio(cuts.resample(8000))
        texts = [cut.supervisions[0].text.encode() for cut in cuts]
        letters = torch.tensor(list(b"".join(texts)))
        return sounds, lengths, letters, torch.tensor([len(text) for text in texts])


cuts = CutSet.from_shar(in_dir=sys.argv[1], shuffle_shards=True, seed=0)
sampler = DynamicBucketingSampler(cuts, max_duration=60, num_buckets=4, shuffle=True, buffer_size=4096, seed=0)
if Path(sys.argv[2]).exists():
    sampler.load_state_dict(torch.load(sys.argv[2], weights_only=False))
loader = DataLoader(IterableDatasetWrapper(Batches(), sampler), batch_size=None)
model = nn.Sequential(nn.Conv1d(1, 64, 400, 80), nn.ReLU(), nn.Conv1d(64, 256, 5, padding=2), nn.LogSoftmax(1))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step, (sounds, lengths, letters, counts) in enumerate(loader, 1):  # noqa: B007
    scores = model(sounds[:, None]).permute(2, 0, 1)
    loss = nn.functional.ctc_loss(scores, letters, (lengths - 320) // 80, counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(sampler.state_dict(), sys.argv[2])
print(f"{step} batches, loss {loss.item():.2f}")
