"""Reference RMSNorm, rotary embedding and SwiGLU against transformers' own formulas."""

from __future__ import annotations

import pytest
import torch
from toy import rope_tables
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels.norm.reference import add_rms_norm, rms_norm
from kernels.rope.reference import rope
from kernels.silu_mul.reference import silu_mul

# Two float32 formulas of the same value: a few roundings apart.
FEW_ULPS = 1e-6


@pytest.mark.parametrize("rows", [1, 5, 123])
@pytest.mark.parametrize("size", [1, 33, 96, 577])
def test_rms_norm(rows: int, size: int) -> None:
    g = torch.Generator().manual_seed(size)
    x = torch.randn(rows, size, generator=g) * 3
    module = LlamaRMSNorm(size, eps=1e-5)
    weight = torch.randn(size, generator=g)
    module.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), module(x).detach(), atol=FEW_ULPS, rtol=FEW_ULPS)


def test_rms_norm_per_head_and_empty() -> None:
    x = torch.randn(5, 3, 32)
    weight = torch.randn(32)
    want = torch.stack([rms_norm(x[:, h], weight, 1e-6) for h in range(3)], dim=1)
    assert torch.equal(rms_norm(x, weight, 1e-6), want)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 3, 32)


def test_add_rms_norm_returns_both() -> None:
    x, residual, weight = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_eps_keeps_zero_rows_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-5), torch.zeros(1, 8))


@pytest.mark.parametrize("head_dim", [2, 30, 64])
def test_rope(head_dim: int) -> None:
    positions = torch.tensor([0, 3, 3, 122, 7], dtype=torch.int32)
    cos, sin = rope_tables(128, head_dim)
    q, k = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim)
    full_cos = torch.cat((cos, cos), -1)[positions.long()].unsqueeze(0)
    full_sin = torch.cat((sin, sin), -1)[positions.long()].unsqueeze(0)
    want_q, want_k = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), full_cos, full_sin)
    torch.testing.assert_close(rope(q, positions, cos, sin), want_q[0].transpose(0, 1), atol=FEW_ULPS, rtol=FEW_ULPS)
    torch.testing.assert_close(rope(k, positions, cos, sin), want_k[0].transpose(0, 1), atol=FEW_ULPS, rtol=FEW_ULPS)


def test_position_zero_is_identity() -> None:
    cos, sin = rope_tables(4, 32)
    x = torch.randn(2, 3, 32)
    assert torch.equal(rope(x, torch.tensor([0, 0]), cos, sin), x)


def test_silu_mul() -> None:
    gate, up = torch.randn(123, 77) * 4, torch.randn(123, 77)
    want = torch.nn.functional.silu(gate.double()) * up
    torch.testing.assert_close(silu_mul(gate, up).double(), want, atol=FEW_ULPS, rtol=FEW_ULPS)
    extreme = torch.tensor([[-200.0, 200.0, 0.0]])
    assert silu_mul(extreme, torch.ones(1, 3)).tolist() == [[0.0, 200.0, 0.0]]
    assert torch.equal(silu_mul(gate[[7]], up[[7]]), silu_mul(gate, up)[[7]])
