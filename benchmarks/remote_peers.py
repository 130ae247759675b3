"""Other libraries on the shards of a server: ``remote_peers.py NAME URL SHARDS`` prints what a pass over them took.

URL is of a web server that serves the folder `remote` of the benchmarks, also as path-style S3. litdata and mosaic
read formats of their own, which ``remote_peers.py NAME`` alone makes once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE] + [HERE]  # after the peers' imports

from measure import DATA  # noqa: E402
from processes import cpu_seconds  # noqa: E402

ROOT, CACHE = DATA / "remote", DATA / "remote-caches"
WORKERS = 4  # those that wait for a network are more than the cores

PEERS: dict[str, tuple[str, tuple[str, ...], Callable[[str, list[str]], Iterable[Any]]]] = {}


def peer(name: str, module: str, *environments: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how a peer yields its samples, the module it needs, and the suite's environments that may have it."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PEERS[name] = module, environments, function
        return function

    return register


def samples_of(name: str) -> Iterator[dict[str, Any]]:
    from sets import read_samples

    yield from read_samples(tuple(map(str, sorted((ROOT / name).glob("*.tar")))))


@peer("webdataset pipe:curl", "webdataset", "webdataset_")
def webdataset(url: str, names: list[str]) -> Iterable[Any]:
    from webdataset import WebDataset, WebLoader

    urls = [f"pipe:curl -s -L {url}/{name}" for name in names]
    dataset = WebDataset(urls, shardshuffle=False).batched(64, collation_fn=list)
    return (each for batch in WebLoader(dataset, batch_size=None, num_workers=WORKERS) for each in batch)


@peer("wids", "wids", "webdataset_")
def wids(url: str, names: list[str]) -> Iterable[Any]:
    from wids import ShardListDataset

    manifest = ROOT / names[0].partition("/")[0] / "s.shards.json"
    entries = json.loads(manifest.read_text())["shardlist"]
    shards = [{**entry, "url": f"{url}/{name}"} for entry, name in zip(entries, names)]
    dataset = ShardListDataset(shards, cache_dir=str(CACHE / "wids"), transformations=[])
    for place in range(len(dataset)):
        sample = dataset[place]
        yield {field: sample[field].read() for field in (".bin", ".cls")}


@peer("HF datasets", "datasets", "datasets_")
def datasets(url: str, names: list[str]) -> Iterable[Any]:
    from datasets import load_dataset

    files = {"train": [f"{url}/{name}" for name in names]}
    return load_dataset("webdataset", data_files=files, split="train", streaming=True)


@peer("litdata", "litdata", "litdata_")
def litdata(url: str, names: list[str]) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    place = f"s3://litdata/{names[0].partition('/')[0]}"
    dataset = StreamingDataset(place, cache_dir=str(CACHE / "litdata"), storage_options={"endpoint_url": url})
    loader = StreamingDataLoader(
        dataset, batch_size=64, num_workers=WORKERS, collate_fn=lambda items: [*map(bytes, items)]
    )
    return (each for batch in loader for each in batch)


def make_litdata(name: str) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(ROOT / "litdata" / name), chunk_bytes="64MB")
    for place, sample in enumerate(samples_of(name)):
        writer.add_item(place, sample["bin"])
    writer.done()
    writer.merge(1)


@peer("mosaic streaming", "streaming", "streaming_", "streaming")
def mosaic(url: str, names: list[str]) -> Iterable[Any]:
    from peers import _torchvision  # noqa: F401
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = url
    place = f"s3://mosaic/{names[0].partition('/')[0]}"
    dataset = StreamingDataset(remote=place, local=str(CACHE / "mosaic"), batch_size=64)
    return (each for batch in DataLoader(dataset, 64, num_workers=WORKERS, collate_fn=list) for each in batch)


def make_mosaic(name: str) -> None:
    from peers import _torchvision  # noqa: F401
    from streaming import MDSWriter

    with MDSWriter(out=str(ROOT / "mosaic" / name), columns={"bin": "bytes"}) as writer:
        for sample in samples_of(name):
            writer.write({"bin": sample["bin"]})


@peer("s3torchconnector, bytes only", "s3torchconnector", "streaming_")
def s3torchconnector(url: str, names: list[str]) -> Iterable[Any]:
    from s3torchconnector import S3ClientConfig, S3IterableDataset
    from torch.utils.data import DataLoader

    config = S3ClientConfig(unsigned=True, force_path_style=True)
    places = [f"s3://{name}" for name in names]
    dataset = S3IterableDataset.from_objects(
        places, region="us-east-1", endpoint=url, s3client_config=config, enable_sharding=True, transform=len_of
    )
    return DataLoader(dataset, batch_size=None, num_workers=WORKERS)


def len_of(reader: Any) -> int:
    return len(reader.read())


@peer("obstore, bytes only", "obstore", "litdata_")
def obstore(url: str, names: list[str]) -> Iterable[Any]:
    import asyncio

    from obstore import get_async
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True, "timeout": "300s"})

    async def size_of(name: str) -> int:
        return len(await (await get_async(store, name)).bytes_async())

    async def sizes() -> list[int]:
        return await asyncio.gather(*map(size_of, names))

    return asyncio.run(sizes())


MAKE = {"litdata": make_litdata, "mosaic streaming": make_mosaic}


def main(name: str, url: str = "", *names: str) -> None:
    if not url:
        folders = {"litdata": "litdata", "mosaic streaming": "mosaic"}
        for part in ("large", "small"):
            if not (ROOT / folders[name] / part).exists():
                MAKE[name](part)
        return
    known = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(known, AWS_REGION="us-east-1")
    shutil.rmtree(CACHE, ignore_errors=True)
    begun, cpu = time.perf_counter(), cpu_seconds()
    count = sum(1 for _ in PEERS[name][2](url, list(names)))
    print(json.dumps({"samples": count, "seconds": time.perf_counter() - begun, "cpu": cpu_seconds() - cpu}))


if __name__ == "__main__":
    main(*sys.argv[1:])
