"""What a vLLM worker holds of a published weight, whatever layout it keeps it in: fused with others, cut by tensor
parallelism, or packed for the CPU's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from stretto.models.loading import DTYPES

GATE_UP = ("gate_proj", "up_proj")


def renew_packed_heads(model: nn.Module) -> None:
    """Pack output layers again that were packed for the CPU's kernels. vLLM's reload leaves one that shares its weight
    with the embedding as it was, without a word (seen in 0.32 and 0.26; remove once a tied model passes without).
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def difference(model: Any, name: str, column: int, dtype: str, values: bytes) -> str:
    """How the vector of ``weight_sample.Sampled`` differs from what this worker holds of it; empty where it does not,
    or where this worker holds none of it.
    """
    wanted = torch.frombuffer(bytearray(values), dtype=DTYPES[dtype])
    path, parameter, shard = _place(model, name)
    module = model.get_submodule(path)
    places = [(name, module)]
    if (head := _tied_head(model, module)) is not None:
        places.append((f"{name} (as the output layer)", head))
    texts = []
    for title, place in places:
        rows, whole_rows = _rows(place, shard)
        held = _vector(place, parameter, column, wanted.dtype)
        if held is not None:
            mine = wanted if whole_rows is None else torch.cat([wanted[part] for part in whole_rows])
            texts.append(_compare(title, column, held[rows].float().cpu(), mine.float()))
    return "; ".join(text for text in texts if text)


def _compare(title: str, column: int, held: Tensor, wanted: Tensor) -> str:
    if held.shape != wanted.shape:
        return f"{title}: {len(held)} values are held of {len(wanted)}"
    differing = (held != wanted) & ~(held.isnan() & wanted.isnan())
    if not differing.any():
        return ""
    at = int(differing.nonzero()[0])
    return (
        f"{title}: {int(differing.sum())} of {len(wanted)} values of column {column} differ, the first is "
        f"{float(held[at]):.9g} in the engine and {float(wanted[at]):.9g} in the actor"
    )


def _place(model: Any, name: str) -> tuple[str, str, str | None]:
    """Module path and parameter of a published name, and which of the fused parts it is there."""
    for start, replaced in model.hf_to_vllm_mapper.orig_to_new_prefix.items():
        if name.startswith(start):
            name = replaced + name[len(start) :]
            break
    path, _, parameter = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    for fused, parts in model.packed_modules_mapping.items():
        if last in parts and fused != last:
            return f"{parent}.{fused}", parameter, last
    return path, parameter, None


def _tied_head(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The output layer that shares the weight of an embedding ``module``, if there is one."""
    for other in model.modules():
        if isinstance(other, ParallelLMHead) and other is not module:
            return other if other.weight is getattr(module, "weight", None) else None
    return None


def _vector(module: Any, parameter: str, column: int, dtype: torch.dtype) -> Tensor | None:
    """A whole bias or scale, or a column of a matrix; None where another worker holds that column.

    A matrix that was packed for the CPU's kernels can only be read by a product with a unit vector, which is exact:
    all other terms of its sums are zeros.
    """
    tensor = getattr(module, parameter)
    if parameter == "bias":
        return tensor
    if isinstance(module, RowParallelLinear):
        owner, column = divmod(column, module.input_size_per_partition)
        if owner != module.tp_rank:
            return None
    if isinstance(module, LinearBase | ParallelLMHead) and hasattr(module, "cpu_linear"):
        width = module.embedding_dim if isinstance(module, ParallelLMHead) else module.input_size_per_partition
        unit = torch.zeros(1, width, dtype=dtype)
        unit[0, column] = 1
        return module.quant_method.apply(module, unit, None)[0]
    return tensor if tensor.ndim == 1 else tensor.flatten(1)[:, column]


def _rows(module: Any, shard: str | None) -> tuple[slice, list[slice] | None]:
    """Which rows of what ``module`` holds here belong to ``shard`` (None: all), and which of the whole tensor's rows
    those are (None: all).
    """
    if isinstance(module, QKVParallelLinear):
        return _qkv_rows(module, shard)
    if isinstance(module, MergedColumnParallelLinear) and shard is not None:
        size = module.output_size_per_partition // 2
        return _nth(GATE_UP.index(shard), size), [_nth(module.tp_rank, size)]
    if isinstance(module, ColumnParallelLinear):
        return slice(None), [_nth(module.tp_rank, module.output_size_per_partition)]
    if isinstance(module, VocabParallelEmbedding):
        mine = module.shard_indices
        begin, end = mine.org_vocab_start_index, mine.org_vocab_end_index
        return slice(0, end - begin), [slice(begin, end)]
    return slice(None), None


def _qkv_rows(module: Any, shard: str | None) -> tuple[slice, list[slice]]:
    query, key = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    whole_query, whole_key = module.total_num_heads * module.head_size, module.total_num_kv_heads * module.head_size
    group = module.tp_rank // module.num_kv_head_replicas
    held = {"q_proj": (0, query), "k_proj": (query, key), "v_proj": (query + key, key)}
    if shard is not None:
        begin, size = held[shard]
        return slice(begin, begin + size), [_nth(module.tp_rank if shard == "q_proj" else group, size)]
    parts = [_nth(module.tp_rank, query)]
    for begin in (whole_query, whole_query + whole_key):
        mine = _nth(group, key)
        parts.append(slice(begin + mine.start, begin + mine.stop))
    return slice(None), parts


def _nth(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)
