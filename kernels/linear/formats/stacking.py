"""Matrices of one published form on top of each other, so that one product serves all of them. Knows fields; refuses to know layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.linear.formats import Float8Weight, GroupWeight, Int8Weight, MxWeight, PublishedWeight


def stacked(weights: Sequence[PublishedWeight], bias: torch.Tensor | None) -> PublishedWeight | None:
    """One weight whose outputs are those of `weights` in order, or None where they do not share form, groups and column order."""
    groups = [w for w in weights if isinstance(w, GroupWeight)]
    if len(groups) == len(weights):
        return _groups(groups, bias)
    floats = [w for w in weights if isinstance(w, Float8Weight)]
    if len(floats) == len(weights):
        return _floats(floats, bias)
    shared = [w for w in weights if isinstance(w, MxWeight)]
    if len(shared) == len(weights):
        return MxWeight(torch.cat([w.codes for w in shared]), torch.cat([w.exponent for w in shared]), bias)
    whole = [w for w in weights if isinstance(w, Int8Weight)]
    if len(whole) == len(weights):
        return Int8Weight(torch.cat([w.codes for w in whole]), torch.cat([w.scale for w in whole]), bias)
    return None


def _groups(weights: Sequence[GroupWeight], bias: torch.Tensor | None) -> GroupWeight | None:
    first = weights[0]
    for other in weights[1:]:
        if (other.bits, other.group, other.scale.dtype) != (first.bits, first.group, first.scale.dtype):
            return None
        if (other.order is None) != (first.order is None):
            return None
        if other.order is not None and first.order is not None and not torch.equal(other.order, first.order):
            return None
    scale, zero = torch.cat([w.scale for w in weights], 1), torch.cat([w.zero for w in weights], 1)
    return replace(first, codes=torch.cat([w.codes for w in weights]), scale=scale, zero=zero, bias=bias)


def _floats(weights: Sequence[Float8Weight], bias: torch.Tensor | None) -> Float8Weight | None:
    """Scales of different heights become one a row; blocks stay blocks where every matrix but the last is whole blocks high."""
    if len({w.columns for w in weights}) > 1:
        return None
    values = torch.cat([w.values.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn)
    rows = weights[0].rows
    if all(w.rows == rows for w in weights) and all(w.out_features % rows == 0 for w in weights[:-1]):
        return Float8Weight(values, torch.cat([w.scale for w in weights]), rows, weights[0].columns, bias)
    scale = torch.cat([w.scale.repeat_interleave(w.rows, 0)[: w.out_features] for w in weights])
    return Float8Weight(values, scale, 1, weights[0].columns, bias)
