"""Shards to the Hugging Face Hub, with cards and a page of them: python examples/publish.py FOLDER USER/NAME."""

import json
import sys
from pathlib import Path
from subprocess import run

from huggingface_hub import HfApi, metadata_load, metadata_save

from tarshards.formats.croissant import write_card

folder, name = Path(sys.argv[1]), sys.argv[2]
splits = {path.name.removesuffix(".shards.json"): path for path in sorted(folder.glob("*.shards.json"))}
files, counts = [], []
for split, manifest in splits.items():
    shards = json.loads(manifest.read_text())["shardlist"]
    if {shard["url"] for shard in shards} != {path.name for path in folder.glob(f"{split}-*.tar")}:
        sys.exit(f"{manifest} does not list the same shards as {split}-*.tar")
    files.append({"split": split, "path": f"{split}-*.tar"})
    samples, size = (sum(shard[name] for shard in shards) for name in ("nsamples", "filesize"))
    counts.append({"name": split, "num_examples": samples, "num_bytes": size})

readme = folder / "README.md"
about = (metadata_load(readme) if readme.exists() else None) or {}
about |= {"configs": [{"config_name": "default", "data_files": files}], "dataset_info": {"splits": counts}}
metadata_save(readme, about)
write_card(folder / "croissant.json", splits, name=name.rpartition("/")[2], licence=about.get("license"))
run(["tarview", "--static", folder, "--overwrite", *splits.values()], check=True)
hub = HfApi()
hub.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
print(hub.upload_folder(repo_id=name, repo_type="dataset", folder_path=folder))
