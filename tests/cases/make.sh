#!/usr/bin/env bash
# The archives here, as the programs made them: GNU tar, bsdtar, xz, lz4, zstd and compress. Run in an empty folder.
set -euo pipefail
export LC_ALL=C.UTF-8 TZ=UTC
out=$PWD
work=$(mktemp -d)
cd "$work"

# Links: a hard one, symbolic ones in the folder and across folders, one to a folder, and a long name.
mkdir -p set/d
printf one >set/1.txt
printf 1 >set/1.cls
ln set/1.txt set/2.txt
printf 2 >set/2.cls
ln -s ../1.txt set/d/3.txt
printf 3 >set/d/3.cls
ln -s 3.txt set/d/4.txt
long=$(printf 'n%.0s' {1..110})
ln set/1.txt "set/$long.txt"
ln -s d set/v1.0
for format in gnu pax; do
    tar -b1 --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=$format -cf "$out/links-$format.tar" set
done
find set | sort | bsdtar -b1 --format=pax --uid 0 --gid 0 -n -cf "$out/links-bsdtar.tar" -T -

# Sparse members: 20 islands, which need more than one block of the old format, and a hole at the end.
for i in $(seq 0 19); do
    printf 'island %d' "$i" | dd of=a.bin bs=1 seek=$((i * 8192)) conv=notrunc status=none
done
truncate -s 200000 a.bin
printf 7 >a.cls
for version in 0.0 0.1 1.0; do
    tar -b1 -S --hole-detection=raw --format=pax --sparse-version=$version --mtime=@0 -cf "$out/sparse-$version.tar" a.bin a.cls
done
tar -b1 -S --hole-detection=raw --format=gnu --mtime=@0 -cf "$out/sparse-old.tar" a.bin a.cls
for i in 1 9; do
    printf 'island %d' "$i" | dd of=b.bin bs=1 seek=$((i * 8192)) conv=notrunc status=none
done
truncate -s 200000 b.bin
printf 8 >b.cls
bsdtar -b1 --format=pax --read-sparse -cf "$out/sparse-bsdtar.tar" b.bin b.cls

# Dots in the names of files: one key, and a field for each number.
mkdir dots
for i in $(seq -w 70); do printf '%s' "$i" >dots/img_0.0000$i.jpg; done
tar -b1 --sort=name --mtime=@0 --format=ustar -cf - dots | gzip -9n >"$out/dots.tar.gz"

# Compressions: of one plain archive.
printf text >a.txt
tar -b1 --mtime=@0 --format=ustar -cf plain.tar a.txt a.cls
xz --format=lzma -c plain.tar >"$out/plain.tar.lzma"
lz4 -qc plain.tar >"$out/plain.tar.lz4"
compress -c plain.tar >"$out/plain.tar.Z" || [ $? -eq 2 ]
for long in 28 31; do zstd -q --long=$long -c <plain.tar >"$out/long-$long.tar.zst"; done
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 10240\n' 7 >"$out/pointer.tar"
rm -r "$work"
