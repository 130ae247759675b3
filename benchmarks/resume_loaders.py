"""Loaders of the resume matrix: for each peer a function from a folder and a kind of work to a function from setups.

Kinds are "plain", "filter" (every third sample is left out), "mixture" (two datasets with equal weights) and
"shuffled"; plain loaders shuffle too where they need no buffer. What a peer cannot do raises NotImplementedError. Each
loader is made as the peer's documentation recommends for exact resumes.
Samples are numbered, those of the second dataset from 1000.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tarshards.testing import Setup

Make = Callable[[Setup], Any]
OTHER = 1000  # the first number of the second dataset


def is_kept(number: int) -> bool:
    return number % 3 != 1


def shards_of(setup: Setup, first: int = 0) -> list[list[int]]:
    return [[first + number for number in shard] for shard in setup.numbers]


@cache
def tars(folder: Path, shards: tuple[int, ...], first: int = 0) -> list[str]:
    """Write tars, unless they are there; return their paths."""
    place = folder / f"tars-{first}-{'-'.join(map(str, shards))}"
    place.mkdir(exist_ok=True)
    urls = []
    for shard, numbers in enumerate(shards_of(Setup(shards), first)):
        urls.append(str(place / f"{shard:06d}.tar"))
        with tarfile.open(urls[-1], "w") as archive:
            for number in numbers:
                content = str(number).encode()
                member = tarfile.TarInfo(f"{number:06d}.cls")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return urls


class Epochs:
    """A loader of one that is made for each epoch; *make(epoch)* returns an iterable with a state."""

    def __init__(self, make: Callable[[int], Any], save: Callable[[Any], Any], load: Callable[[Any, Any], Any]):
        self.make, self.save, self.load = make, save, load
        self.epoch, self.inner = 0, make(0)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner
        self.epoch += 1
        self.inner = self.make(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "inner": self.save(self.inner)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.inner = self.make(self.epoch)
        self.load(self.inner, state["inner"])


# Ours.


def tarshards_(folder: Path, kind: str) -> Make:
    from tarshards import ShardDataset, ShardLoader, build_index, mix

    def dataset(setup: Setup, first: int = 0) -> ShardDataset:
        urls = tars(folder, setup.shards, first)
        for url in urls:
            if not Path(f"{url}.index").exists():
                build_index(url).save(url)
        data = ShardDataset(urls, shuffle=True, seed=setup.seed, tail="exact")
        return data.filter(lambda sample: is_kept(int(sample["cls"]))) if kind == "filter" else data

    def make(setup: Setup) -> ShardLoader:
        data = dataset(setup)
        if kind == "mixture":
            data = mix({"a": data, "b": dataset(setup, OTHER)}, until="last", tail="exact")
        return ShardLoader(data, setup.batch_size, num_workers=setup.workers)

    return make


# Plain tars.


def webdataset(folder: Path, kind: str) -> Make:
    """WebDataset in torchdata's StatefulDataLoader, which replays it."""
    import webdataset as wds
    from torchdata.stateful_dataloader import StatefulDataLoader

    def dataset(setup: Setup, first: int = 0) -> Any:
        urls = tars(folder, setup.shards, first)
        data = wds.WebDataset(urls, shardshuffle=100, detshuffle=True, seed=setup.seed, nodesplitter=wds.split_by_node)
        if kind == "shuffled":
            data = data.shuffle(10)
        return data.select(lambda sample: is_kept(int(sample["cls"]))) if kind == "filter" else data

    def make(setup: Setup) -> Any:
        data = dataset(setup)
        if kind == "mixture":
            data = wds.RoundRobin([data, dataset(setup, OTHER)], longest=True)
        return StatefulDataLoader(data, setup.batch_size, num_workers=setup.workers, collate_fn=list)

    return make


def datasets(folder: Path, kind: str) -> Make:
    """Streamed tars in torchdata's StatefulDataLoader."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    datasets.disable_progress_bars()

    def dataset(setup: Setup, first: int = 0) -> Any:
        files = {"train": tars(folder, setup.shards, first)}
        data = datasets.load_dataset(
            "webdataset", data_files=files, split="train", streaming=True, cache_dir=str(folder)
        )
        return data.filter(lambda sample: is_kept(int(sample["cls"]))) if kind == "filter" else data

    def make(setup: Setup) -> Epochs:
        data = dataset(setup)
        if kind == "mixture":
            data = datasets.interleave_datasets([data, dataset(setup, OTHER)], stopping_strategy="all_exhausted")
        if kind == "shuffled":
            data = data.shuffle(seed=setup.seed, buffer_size=10)
        data = split_dataset_by_node(data, setup.rank, setup.ranks)

        def loader(epoch: int) -> StatefulDataLoader:
            data.set_epoch(epoch)
            return StatefulDataLoader(data, setup.batch_size, num_workers=setup.workers, collate_fn=list)

        return Epochs(loader, lambda inner: inner.state_dict(), lambda inner, state: inner.load_state_dict(state))

    return make


def energon(folder: Path, kind: str) -> Make:
    """Its training data repeat without end; an epoch is as many batches as the dataset has."""
    import yaml
    from peers import _torchvision  # noqa: F401 - before what imports torchvision

    # isort: split
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        Sample,
        SkipSample,
        WorkerConfig,
        basic_sample_keys,
        edataclass,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    @edataclass
    class Number(Sample):
        number: int

    @stateless
    def cook(sample: dict[str, Any]) -> Number:
        number = int(sample["cls"])
        if kind == "filter" and not is_kept(number):
            raise SkipSample
        return Number(**basic_sample_keys(sample), number=number)

    class Encoder(DefaultTaskEncoder):
        cookers = [Cooker(cook)]  # noqa: RUF012

        @stateless
        def batch(self, samples: list[Number]) -> list[int]:
            return [sample.number for sample in samples]

    @cache
    def prepared(shards: tuple[int, ...], first: int) -> Path:
        urls = tars(folder, shards, first)
        place = Path(urls[0]).parent
        if not (place / ".nv-meta" / "dataset.yaml").exists():
            names = [Path(url).name for url in urls]
            WebdatasetPreparator.prepare_dataset(
                place, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
            )
            lines = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
            (place / ".nv-meta" / "dataset.yaml").write_text(lines)
        return place

    class Loader:
        def __init__(self, setup: Setup):
            place = prepared(setup.shards, 0)
            if kind == "mixture":
                blend = [{"weight": 1, "path": str(prepared(setup.shards, first))} for first in (0, OTHER)]
                place = folder / f"mixture-{'-'.join(map(str, setup.shards))}.yaml"
                kinds = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
                place.write_text(yaml.safe_dump({**kinds, "splits": {"train": {"blend": blend}}}))
            data = get_train_dataset(
                place,
                worker_config=WorkerConfig(
                    rank=setup.rank, world_size=setup.ranks, num_workers=setup.workers, seed_offset=setup.seed
                ),
                batch_size=setup.batch_size,
                shuffle_buffer_size=10 if kind == "shuffled" else None,
                max_samples_per_sequence=10 if kind == "shuffled" else None,
                task_encoder=Encoder(),
                virtual_epoch_length=setup.total // setup.ranks // setup.batch_size,
            )
            self.loader = get_savable_loader(data, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

        def state_dict(self) -> Any:
            return self.loader.save_state_rank()

        def load_state_dict(self, state: Any) -> None:
            self.loader.restore_state_rank(state)

    return Loader


# Formats of their own.


def grain(folder: Path, kind: str) -> Make:
    """A MapDataset of numbers in an ElasticIterator, which refuses filters; with one, in its usual iterator.

    Its workers are threads here: each of its processes imports all of Grain.
    """
    import grain
    from grain.experimental import ElasticIterator

    def dataset(setup: Setup, epoch: int) -> Any:
        sources = [0, OTHER] if kind == "mixture" else [0]
        parts = [
            grain.MapDataset.source([n for shard in shards_of(setup, first) for n in shard]).shuffle(
                seed=1000 * setup.seed + epoch
            )
            for first in sources
        ]
        return grain.MapDataset.mix(parts) if len(parts) > 1 else parts[0]

    def make(setup: Setup) -> Epochs:
        def loader(epoch: int) -> Any:
            data = dataset(setup, epoch)
            threads = grain.ReadOptions(num_threads=setup.workers, prefetch_buffer_size=2 * setup.workers)
            if kind == "filter":
                rows = data[setup.rank :: setup.ranks].filter(is_kept).to_iter_dataset(threads)
                return iter(rows.batch(setup.batch_size))
            shard = grain.sharding.ShardOptions(shard_index=setup.rank, shard_count=setup.ranks)
            return iter(ElasticIterator(data, setup.batch_size * setup.ranks, shard, read_options=threads))

        return Epochs(loader, lambda inner: inner.get_state(), lambda inner, state: inner.set_state(state))

    return make


def litdata(folder: Path, kind: str) -> Make:
    """StreamingDataset in its StreamingDataLoader; ranks are set as torch.distributed would."""
    from peers import _torchvision  # noqa: F401 - before what imports torchvision

    # isort: split
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter
    from litdata.utilities import env

    if kind == "filter":
        raise NotImplementedError("has no filter")

    @cache
    def written(shards: tuple[int, ...], first: int) -> str:
        place = folder / f"litdata-{first}-{'-'.join(map(str, shards))}"
        place.mkdir(exist_ok=True)
        if not (place / "index.json").exists():
            writer = BinaryWriter(str(place), chunk_size=shards[0])
            for place_, number in enumerate(n for shard in shards_of(Setup(shards), first) for n in shard):
                writer.add_item(place_, number)
            writer.done()
            writer.merge(1)
        return str(place)

    def be_rank(rank: int, ranks: int) -> None:
        world = env._DistributedEnv(ranks, rank, 1)
        env._DistributedEnv.detect = classmethod(lambda cls: world)

    def make(setup: Setup) -> Any:
        firsts = [0, OTHER] if kind == "mixture" else [0]
        be_rank(0, 1)  # a writer waits for those of all ranks
        places = [written(setup.shards, first) for first in firsts]
        be_rank(setup.rank, setup.ranks)
        parts = [StreamingDataset(place, shuffle=True, seed=setup.seed + 42) for place in places]
        data = CombinedStreamingDataset(parts, seed=setup.seed + 42) if len(parts) > 1 else parts[0]
        return StreamingDataLoader(data, batch_size=setup.batch_size, num_workers=setup.workers)

    return make


def streaming(folder: Path, kind: str) -> Make:
    """MosaicML's StreamingDataset in its StreamingDataLoader; each rank is a process."""
    from peers import _torchvision  # noqa: F401 - before what imports torchvision

    # isort: split
    import streaming
    import torch.distributed as dist
    from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

    if kind == "filter":
        raise NotImplementedError("has no filter")

    @cache
    def written(shards: tuple[int, ...], first: int) -> str:
        place = folder / f"mds-{first}-{'-'.join(map(str, shards))}"
        if not place.exists():
            with MDSWriter(out=str(place), columns={"number": "int"}, size_limit=60) as writer:
                for shard in shards_of(Setup(shards), first):
                    for number in shard:
                        writer.write({"number": number})
        return str(place)

    def make(setup: Setup) -> Any:
        if not dist.is_initialized():  # else each step makes its own group, and some groups never form
            dist.init_process_group("gloo", rank=setup.rank, world_size=setup.ranks)
        streaming.base.util.clean_stale_shared_memory()
        firsts = [0, OTHER] if kind == "mixture" else [0]
        if setup.rank:
            dist.barrier()  # rank 0 writes
        places = [written(setup.shards, first) for first in firsts]
        if not setup.rank:
            dist.barrier()
        data = StreamingDataset(
            streams=[Stream(local=place) for place in places],
            shuffle=True,
            shuffle_seed=setup.seed,
            batch_size=setup.batch_size,
            num_canonical_nodes=1,
        )
        return StreamingDataLoader(data, batch_size=setup.batch_size, num_workers=setup.workers)

    return make
