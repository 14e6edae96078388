"""Adapters of sibling layers multiplied together, in the graph of a compiled decoder layer.

q, k and v are fed one tensor, as are gate and up. Each of their adapters reads it for itself, and
in backward reads and writes the whole gradient of that tensor to add a matrix of rank r. With the
matrices of the siblings side by side (`A` [R, K], R the sum of ranks) each is done once:

    s · x A_qᵀ, s · x A_kᵀ, s · x A_vᵀ         s · x Aᵀ, in three parts         [M, K] @ [K, R]
    (d_q + u_q A_q) + (d_k + u_k A_k) + ..     (d_q + u A) + d_k + d_v          [M, R] @ [R, K]
    u_qᵀ x, u_kᵀ x, u_vᵀ x                     uᵀ x, in three parts             [R, M] @ [M, K]

The first and the last compute what was computed, number by number. The second adds the same
summands in float32 inside one GEMM, where each partial sum was rounded to 16 bits.

This is done to the graph, after AOTAutograd has split it into forward and backward, so modules,
their names, hooks and parameters know nothing of it. Products of adapters are found by their form:
`lora.times` alone makes an `addmm` with beta=0. Only equal operands, scalings and types are joined,
whatever their ranks; PEFT's own forward (dropout, DoRA) has other forms and stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_aten = torch.ops.aten
_ADDMM, _ADD = _aten.addmm.default, _aten.add.Tensor
_PRODUCTS = (_aten.mm.default, _aten.mm.dtype)
_CAST = torch.ops.prims.convert_element_type.default
_ELEMENTWISE = (_aten.mul.Tensor, _CAST)
_UNSUMMED = (_aten.view.default, _aten.reshape.default, _CAST)


class SiblingAdapters(CustomGraphPass):
    """Pass over the graphs of a compiled layer, before Inductor's own."""

    def __call__(self, graph: Graph) -> None:
        join(graph)

    def uuid(self) -> bytes:
        """Key of this code in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


PASS = SiblingAdapters()
"""The same for all layers: Dynamo shares a graph between those compiled alike."""


def join(graph: Graph) -> int:
    """Join the adapters' products of siblings; returns the number of GEMMs that are left out."""
    before = _products(graph)
    for find, replace in (
        (_inputs, _join_inputs),
        (_gradients, _join_gradients),
        (_sums, _join_sums),
    ):
        for members in find(graph):
            if not _feeds_another(members):
                replace(graph, members)
    if left_out := before - _products(graph):
        from torch._inductor.pattern_matcher import stable_topological_sort

        stable_topological_sort(graph)
        graph.eliminate_dead_code()
    return left_out


def _products(graph: Graph) -> int:
    return sum(n.target is _ADDMM or n.target in _PRODUCTS for n in graph.nodes)


# ------------------------------------------------------------------------------------------ finding


def _is_times(node: Node) -> bool:
    """True for `lora.times`."""
    return node.target is _ADDMM and bool(node.kwargs.get("beta") == 0)


def _inputs(graph: Graph) -> list[list[Node]]:
    """Products t = s · x Aᵀ of one x. Those with B, u = s · g B, have each a g of their own."""
    found = (n for n in graph.nodes if _is_times(n))
    return _grouped(found, lambda n: (n.args[1], n.kwargs.get("alpha", 1), _dtype(n)))


def _gradients(graph: Graph) -> list[list[Node]]:
    """Weight gradients uᵀ x of one x."""
    found = (n for n in graph.nodes if n.target in _PRODUCTS and _transposed(n) is not None)
    return _grouped(found, lambda n: (n.target, *n.args[1:], _dtype(n)))


def _transposed(product: Node) -> Node | None:
    """The u [M, r], scaled or cast, of a product uᵀ x."""
    left: Any = product.args[0]
    if left.target is not _aten.permute.default:
        return None
    node = u = left.args[0]
    while node.target in _ELEMENTWISE:
        node = node.args[0]
    return u if _is_times(node) else None


def _sums(graph: Graph) -> list[list[Node]]:
    """Products d + u A that are summed, by sum; none has another reader."""
    leaves: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        adds = node.target is _ADDMM and not node.kwargs and isinstance(node.args[1], Node)
        if adds and _is_times(node.args[1]) and _shape(node.args[0]) == _shape(node):
            leaves[_sum_of(node)].append(node)
    return [
        members
        for nodes in leaves.values()
        for members in _grouped(nodes, lambda n: (_dtype(n), _shape(n)))
    ]


def _sum_of(node: Node) -> Node:
    """The end of a chain of views, casts and sums, each with one reader."""
    while len(node.users) == 1:
        (reader,) = node.users
        summed = reader.target is _ADD and not reader.kwargs and reader.args[0] != reader.args[1]
        if not (summed and _shape(reader) == _shape(node)) and reader.target not in _UNSUMMED:
            break
        node = reader
    return node


def _grouped(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> list[list[Node]]:
    """Nodes of equal keys, in their order, where there are several."""
    groups: dict[Hashable, list[Node]] = defaultdict(list)
    for node in nodes:
        groups[key(node)].append(node)
    return [members for members in groups.values() if len(members) > 1]


def _feeds_another(members: list[Node]) -> bool:
    """True if an operand of a member is made from the result of another: they cannot be one."""
    ahead = [x for member in members for x in member.all_input_nodes]
    seen = set(ahead)
    while ahead:
        for x in ahead.pop().all_input_nodes:
            if x not in seen:
                seen.add(x)
                ahead.append(x)
    return not seen.isdisjoint(members)


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def _shape(node: Any) -> tuple[str, ...]:
    """Sizes as text, which compares unknown ones without a guard."""
    return tuple(map(str, node.meta["val"].shape))


# ---------------------------------------------------------------------------------------- replacing


class _Writer:
    """Nodes written after a given one."""

    def __init__(self, graph: Graph, after: Node) -> None:
        self._graph, self._after = graph, after

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self._graph.inserting_after(self._after):
            node = self._graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        trace = self._after.meta.get("stack_trace")
        node.meta = {"val": target(*values[0], **values[1]), "stack_trace": trace}
        self._after = node
        return node

    def side_by_side(self, parts: list[Any], dim: int) -> Node:
        return self(_aten.cat.default, parts, dim)

    def rows(self, parts: list[Any]) -> Node:
        """Matrices [r, K], transposed, as one [K, R]."""
        return self.transposed(self.side_by_side(parts, 0))

    def transposed(self, x: Any) -> Node:
        return self(_aten.permute.default, x, [1, 0])

    def split(self, whole: Node, members: list[Node], dim: int) -> None:
        """Let parts of a joint result stand for what its members were."""
        start = 0
        for member in members:
            end = start + member.meta["val"].shape[dim]
            part = self(_aten.slice.Tensor, whole, dim, start, end)
            member.replace_all_uses_with(part)
            start = end


def _join_inputs(graph: Graph, members: list[Node]) -> None:
    write, (unread, x, _) = _Writer(graph, members[-1]), members[-1].args
    weights: list[Any] = [n.args[2] for n in members]
    if all(w.target is _aten.permute.default for w in weights):
        w = write.rows([w.args[0] for w in weights])  # each [r, K]
    else:
        w = write.side_by_side(weights, 1)  # each [K, r]
    unread = write(_aten.slice.Tensor, unread, 0, 0, 1)  # any number: the result has R columns
    whole = write(_ADDMM, unread, x, w, **members[0].kwargs)  # [M, K] @ [K, R]
    write.split(whole, members, 1)
    _erase(graph, members)


def _join_gradients(graph: Graph, members: list[Node]) -> None:
    write = _Writer(graph, members[-1])
    u = write.side_by_side([_transposed(n) for n in members], 1)
    product = members[0]
    whole = write(product.target, write.transposed(u), *product.args[1:])  # [R, M] @ [M, K]
    write.split(whole, members, 0)
    _erase(graph, members)


def _join_sums(graph: Graph, members: list[Node]) -> None:
    write = _Writer(graph, members[-1])
    u = write.side_by_side([n.args[1] for n in members], 1)
    a = write.side_by_side([n.args[2] for n in members], 0)
    whole = write(_ADDMM, members[-1].args[0], u, a)  # [M, R] @ [R, K]
    members[-1].replace_all_uses_with(whole)
    for member in members[:-1]:
        member.replace_all_uses_with(member.args[0])  # pyright: ignore[reportArgumentType]
    _erase(graph, members)


def _erase(graph: Graph, members: list[Node]) -> None:
    for member in members:
        graph.erase_node(member)
