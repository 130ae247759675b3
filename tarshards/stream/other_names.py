"""Names that WebDataset, Squirrel and other loaders use, and what they are called here, for error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

#: Methods of other libraries' datasets, and what only some of ours have.
METHODS = {
    "append": "compose(f), where f takes the stream, or pipe(f), where f takes its samples",
    "associate": "map(f), or join(urls) with shards that have more fields",
    "cache": "Remote(cache_dir=...) caches remote shards",
    "detshuffle": "ShardDataset(urls, shuffle=True, seed=0) shuffles reproducibly",
    "extract_keys": "to_tuple('jpg;png', 'cls')",
    "ledger": "only a stream of shards keeps one",
    "listed": "batched(n, collate=list) makes lists",
    "lmdb_cached": "Remote(cache_dir=...) caches remote shards",
    "log_keys": "map(f), where f writes sample['__key__']",
    "loop": "repeat(n), or repeat() without end",
    "map_dict": "map_fields({'jpg': function})",
    "materialize_dask": "dask_map(f) gives results",
    "mcached": "Remote(cache_dir=...) caches remote shards, and local ones are mapped",
    "numba_map": "map_fields({'npy': numba.njit(f)})",
    "rename": "rename_fields({'new': 'old'})",
    "rename_keys": "rename_fields({'new': 'old'})",
    "resampled": "ShardDataset(urls, resample=True) draws with replacement",
    "rsample": "map(f, rng=True, drop_none=True), where f(sample, rng) returns the sample or None",
    "slice": "take(n), skip(n), or pipe(itertools.islice, begin, end, step)",
    "source_": "Stream(iterable)",
    "split_by_node": "nothing: each rank reads its own part",
    "split_by_rank_pytorch": "nothing: each rank reads its own part",
    "split_by_worker": "nothing: each worker reads its own part",
    "split_by_worker_pytorch": "nothing: each worker reads its own part",
    "then": "pipe(f)",
    "to": "pipe(f)",
    "to_torch_iterable": "torch_iterable(stream)",
    "tqdm": "progress()",
    "unlisted": "flatten()",
    "with_epoch": "ShardLoader(..., steps=n) makes a pass of n batches",
    "xdecode": "decode(...)",
    "zip_index": "enumerate(), or rekey('{index:06d}')",
}
#: Arguments of other libraries' datasets, loaders and stages.
OPTIONS = {
    "batch_sizes": "batch_size=, the first argument after the dataset; bucket() makes batches of varying size",
    "batchsize": "batched(size)",
    "buffer": "workers= also bounds what is in flight",
    "bufsize": "shuffle(size)",
    "cache_dir": "remote=Remote(cache_dir=...)",
    "cache_size": "remote=Remote(cache_dir=..., cache_bytes=...)",
    "callback": "map(f), filter(f) and async_map(f), a function without a name",
    "collation_fn": "collate= in batched(), collate_fn= in a ShardLoader",
    "compress": "the name of the shard, such as a.tar.gz",
    "decoder": ".decode(...)",
    "detshuffle": "shuffle=True, seed=0",
    "drop_last_if_not_full": "partial=False",
    "empty_check": "nothing: datasets without samples are errors",
    "encoder": "nothing: fields are encoded by their extension, also by a function of yours with @encoder('ext')",
    "extensions": ".to_tuple('jpg', 'cls')",
    "handler": "on_error=, a function of the error, 'skip', or Ledger(max_errors=...)",
    "keep_meta": "nothing: entries with a leading _ are not written",
    "max_workers": "workers=",
    "maxcount": "max_samples=",
    "maxsize": "max_bytes=",
    "metrics_conf": "monitor(f), where f gets a Rate with metrics()",
    "min_window_size": "partial=True",
    "missing_is_error": "on_error='skip' leaves out samples without a field",
    "mtime": "nothing: it is fixed, so that the same samples give the same bytes",
    "nodesplitter": "nothing: each rank reads its own part; world= names another",
    "none_is_error": ".filter(f)",
    "opener": "open_writer=, a function of a name that returns a TarWriter",
    "post": "on_finish=, a function of a name and its TarWriter",
    "rename_files": ".rekey(...) and .rename_fields({...})",
    "repeat": ".repeat()",
    "resampled": "resample=True",
    "rng": "seed=",
    "select_files": "fields=",
    "shardshuffle": "shuffle=True",
    "shuffle_buffer_size": "shuffle=True, pool=",
    "splitter": "nothing: ranks and workers read their own parts",
    "start_shard": "start=",
    "stride": "step=",
    "transforms": ".map_tuple(...), .map_fields({...}) or .map(...)",
    "url_to_name": "nothing: Remote(cache_dir=...) names its blocks by the whole URL",
    "user": "nothing: it is fixed, so that the same samples give the same bytes",
    "window_size": "sliding(size)",
    "workersplitter": "nothing: each worker reads its own part",
}

#: What to use in place of names in webdataset's modules that ``tarshards.webdataset`` does not have.
_INSTEAD = {
    "bench cborsiterators checks composable dataset dbcache downloader dsspecs fluid iterators shardcache typecheck": (
        "no module of webdataset 1.0; stages are functions of `filters`, with a leading _ functions of an iterator"
    ),
    "Composable Curried Curried2 Processor Shorthands map_stream stage": (
        "pipelinefilter(f) makes a stage of a function of an iterator, and DataPipeline or compose() take stages"
    ),
    "ChoppedDataset FakeLength Repeatedly ResizedDataset add_length_method": (
        "with_epoch(n) and with_length(n) are methods of WebDataset, and functions of any dataset"
    ),
    "Dataset": "WebDataset(urls)",
    "DBCache DatasetTest": "mcached() keeps samples in memory, Remote(cache_dir=...) blocks of shards on a disk",
    "MSSource PytorchEnv PytorchShardList ShardList ShardSample SimpleShardSample shardlist": (
        "WebDataset(urls, nodesplitter=split_by_node, shardshuffle=True) divides and shuffles shards, "
        "SimpleShardList(urls) is the list"
    ),
    "EOF MultiLoader all_pids multi the_protocol": "WebLoader(dataset, num_workers=n)",
    "cbor2_iterator cbor_iterator cbors2_samples cbors2_to_samples cbors_samples cbors_to_samples": (
        "tarshards.read_rows reads rows of other formats, and `tarimport` makes shards of them"
    ),
    "default_cache_dir default_cache_size download get_file_cached get_filetype islocal lru_cleanup magic_filetype "
    "verbose_cache": "cache_dir= and cache_size= of WebDataset cache blocks of remote shards; no shards are copied",
    "check_pid_is_running get_pid_from_filename without_last_extension": (
        "shards that appear and vanish in a folder are not followed; name them, or a pattern such as data/*.tar"
    ),
    "default_rng resampled_": "resampled(n) is the stage, ResampledShards(urls) draws from a list",
    "envlookup envsubst expand fnmatch_with_braces glob_with_braces": (
        "expand_urls(urls) expands braces, globs and ${NAME}"
    ),
    "call_extension_handler default_decoder": "handle_extension(extensions, f) makes a function for decode()",
    "decode_bin decode_pickle decode_text default_decoders find_decoder": "xdecode(name=f) takes functions of a stream",
    "combine_values dict2tuple tuple2dict": "default_collation_fn(samples) makes a batch",
    "compose compose2 pipeline": "DataPipeline(source, *stages)",
    "parse_field_spec": "to_tuple takes fields as words, with alternatives as 'jpg;png'",
    "pick": "shuffle(size)",
    "gopen_ais gopen_curl gopen_error gopen_file gopen_gsutil gopen_hf gopen_htgs info reader set_options": (
        "gopen(url, mode) opens all URLs"
    ),
    "trace": "nothing: errors name the shard, the offset and the key",
    "bytedata bytelen check_acceptable_input_type check_infos decode_chunks decode_header decode_list encode_chunks "
    "encode_header encode_list load long_to_short magic magic_bytes magic_str read read_chunk roundup save "
    "short_to_long str64 unstr64 write write_chunk": "decode_buffer(data) and encode_buffer(arrays)",
    "repeatedly0": "repeatedly(source, nepochs=, nbatches=)",
    "compute_sample_weights": "RandomMix(datasets, probs)",
    "ObsoleteException deprecated is_iterable lookup_sym modules obsolete safe_eval": "a helper of webdataset's own",
    "bytestr cbor_dumps encode_based_on_extension encode_based_on_extension1 make_handlers mp_dumps tenbin_dumps": (
        "make_encoder(True) encodes samples, by the functions in default_handlers"
    ),
}
ABSENT = {name: instead for names, instead in _INSTEAD.items() for name in names.split()}
#: What other packages call their classes.
_CLASSES = {
    "DataPipeline WebDataset": "ShardDataset(urls)",
    "WebLoader StreamingDataLoader": "ShardLoader(dataset, batch_size)",
    "ResampledShards": "ShardDataset(urls, resample=True)",
    "RandomMix RoundRobin Multiplexer": "mix({'a': a, 'b': b}, weights={'a': 2, 'b': 1})",
    "ShardListDataset": "IndexedShards(urls)",
    "StreamingDataset": "ShardDataset(urls)",
    "DatasetWriter MDSWriter": "write_dataset(dataset, pattern)",
    "Composable IterableSource": "Stream(iterable)",
    "CsvDriver HuggingfaceDriver JsonlDriver MessagepackDriver ParquetDriver ZarrDriver": "read_rows(url)",
    "FileDriver": "open_url(url)",
    "MessagepackStore SquirrelStore": "ShardWriter(pattern), or write_msgpack(rows, url)",
    "Source": "Catalog.add(name, {split: urls})",
}
CLASSES = {name: instead for names, instead in _CLASSES.items() for name in names.split()}


def not_here(package: str, name: str) -> str:
    """Return what to use instead of a *name* that other libraries have, as the end of a message; "" if unknown.

    >>> not_here("tarshards", "WebLoader")
    ': here it is ShardLoader(dataset, batch_size); tarshards.webdataset has the names of webdataset'
    """
    if package == "tarshards.webdataset":
        return f": {ABSENT[name]}" if name in ABSENT else ""
    return f": here it is {CLASSES[name]}; tarshards.webdataset has the names of webdataset" if name in CLASSES else ""


def no_attribute(kind: str, name: str) -> str:
    """Return the message for a missing method.

    >>> no_attribute("Stream", "listed")
    'a Stream has no listed: batched(n, collate=list) makes lists'
    """
    return f"a {kind} has no {name}" + (f": {METHODS[name]}" if name in METHODS else "")


def explained(error: TypeError, given: Iterable[str] = ()) -> TypeError:
    """Return *error*; if it is about an argument as another library names it, the message says what to write here.

    If the error is about a missing argument, the other library's name is looked up among the *given* ones.

    >>> explained(TypeError("f() got an unexpected keyword argument 'maxcount'"))
    TypeError("f() got an unexpected keyword argument 'maxcount': here it is max_samples=")
    """
    if (missing := re.match(r"(.*\(\)) missing \d+ required", str(error))) and (name := _other(given)):
        error = TypeError(f"{missing[1]} got an unexpected keyword argument '{name}'")
    found = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
    if found is None or found[1] not in OPTIONS or "here it is" in str(error):
        return error
    return TypeError(f"{str(error).partition('. Did you mean')[0]}: here it is {OPTIONS[found[1]]}")


def _other(names: Iterable[str]) -> str | None:
    return next((name for name in names if name in OPTIONS), None)


def explains(function: Function) -> Function:
    """Decorate *function* so that errors about arguments named as in other libraries say what to write here."""

    @wraps(function)
    def explaining(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            better = explained(error, options)
            if better is error:
                raise
            raise better from None

    return explaining  # type: ignore[return-value]
