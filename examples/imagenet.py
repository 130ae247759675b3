"""ImageNet's archive to shards: python examples/imagenet.py ILSVRC2012_img_train.tar 'train-{shard:06d}.tar'."""

import io
import sys

from tarshards import ShardWriter, open_shard, read_members

classes = [""]
with open_shard(sys.argv[1]) as archive, ShardWriter(sys.argv[2], max_bytes=10**9) as writer:
    for images in read_members(archive):  # a tar for each class, which is held in memory
        name = images.name.removesuffix(".tar")
        if name <= classes[-1]:
            sys.exit(f"{name} comes after {classes[-1]}: classes are numbered in the order of their names")
        classes.append(name)
        for image in read_members(io.BytesIO(images.data), url=images.name):
            key = f"{name}/{image.name.partition('.')[0]}"
            writer.write({"__key__": key, "jpg": image.data, "cls": len(classes) - 2})
