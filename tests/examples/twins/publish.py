"""Tars to the Hugging Face Hub by hand, without indexes and a page: python publish.py FOLDER USER/NAME SPLIT..."""

import hashlib
import json
import sys
import tarfile
from pathlib import Path

import mlcroissant as mlc
from huggingface_hub import HfApi, metadata_load, metadata_save

TYPES = {"cls": ("text/plain", mlc.DataType.INTEGER), "png": ("image/png", mlc.DataType.IMAGE_OBJECT)}
folder, name = Path(sys.argv[1]), sys.argv[2]
files, counts, distribution, record_sets = [], [], [], []
for split in sys.argv[3:]:
    keys, shards = 0, sorted(folder.glob(f"{split}-*.tar"))
    for shard in shards:
        with tarfile.open(shard) as tar:
            keys += len({member.name.partition(".")[0] for member in tar})
        with open(shard, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        about = {"id": shard.name, "name": shard.name, "content_url": shard.name, "sha256": digest}
        size = f"{shard.stat().st_size} B"
        tar = mlc.FileObject(**about, content_size=size, encoding_formats=["application/x-tar"])
        distribution.append(tar)
    for field, (kind, data_type) in TYPES.items():
        members, records = f"{split}/{field}-members", f"{split}/{field}"
        about = {"id": members, "name": members, "includes": [f"*.{field}"], "encoding_formats": [kind]}
        distribution.append(mlc.FileSet(**about, contained_in=[shard.name for shard in shards]))
        path = mlc.Extract(file_property=mlc.FileProperty.fullpath)
        stem = mlc.Transform(regex=r"^((?:.*/|)[^.]+)[.]")
        key = mlc.Source(file_set=members, extract=path, transforms=[stem])
        content = mlc.Source(file_set=members, extract=mlc.Extract(file_property=mlc.FileProperty.content))
        ids = f"{records}/key", f"{records}/content"
        fields = [
            mlc.Field(id=ids[0], name=ids[0], data_types=mlc.DataType.TEXT, source=key),
            mlc.Field(id=ids[1], name=ids[1], data_types=data_type, source=content),
        ]
        record_sets.append(mlc.RecordSet(id=records, name=records, key=ids[0], fields=fields))
    files.append({"split": split, "path": f"{split}-*.tar"})
    size = sum(shard.stat().st_size for shard in shards)
    counts.append({"name": split, "num_examples": keys, "num_bytes": size})

readme = folder / "README.md"
about = (metadata_load(readme) if readme.exists() else None) or {}
about |= {"configs": [{"config_name": "default", "data_files": files}], "dataset_info": {"splits": counts}}
metadata_save(readme, about)
card = mlc.Metadata(name=name.rpartition("/")[2], distribution=distribution, record_sets=record_sets)
(folder / "croissant.json").write_text(json.dumps(card.to_json(), indent=2, default=str))
hub = HfApi()
hub.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
print(hub.upload_folder(repo_id=name, repo_type="dataset", folder_path=folder))
