import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerances import MERGE

from turnkv.kernels.flash import merge_attention

EMPTY = -torch.inf


def partial(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one set of keys, [H, T, E] and [H, T]: what a body would hand to `merge_attention`."""
    return torch.softmax(logits, dim=-1) @ values, torch.logsumexp(logits, dim=-1)


@settings(deadline=None)
@given(st.sampled_from(sorted(MERGE, key=str)), st.integers(1, 20), st.integers(1, 20), st.integers(0, 999))
def test_two_parts_make_the_whole(dtype: torch.dtype, num_a: int, num_b: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, num_a + num_b, generator=random).to(dtype)
    values = torch.randn(3, num_a + num_b, 5, generator=random).to(dtype)
    out_a, lse_a = partial(logits[..., :num_a], values[:, :num_a])
    out_b, lse_b = partial(logits[..., num_a:], values[:, num_a:])
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    whole_out, whole_lse = partial(logits.double(), values.double())
    torch.testing.assert_close(out.double(), whole_out, rtol=0, atol=MERGE[dtype])
    torch.testing.assert_close(lse.double(), whole_lse, rtol=0, atol=MERGE[dtype])


@pytest.mark.parametrize("dtype", MERGE, ids=str)
def test_an_empty_part_changes_nothing(dtype: torch.dtype) -> None:
    out, lse = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3).to(dtype)
    nothing, empty = torch.zeros_like(out), torch.full_like(lse, EMPTY)
    for merged_out, merged_lse in (
        merge_attention(out, lse, nothing, empty),
        merge_attention(nothing, empty, out, lse),
    ):
        assert torch.equal(merged_out, out)
        assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("dtype", MERGE, ids=str)
def test_two_empty_parts_are_zero_and_minus_infinity(dtype: torch.dtype) -> None:
    garbage = torch.full((2, 3, 4), 5.0, dtype=dtype)
    empty = torch.full((2, 3), EMPTY, dtype=dtype)
    out, lse = merge_attention(garbage, empty, garbage, empty)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, empty)


@pytest.mark.parametrize("dtype", MERGE, ids=str)
def test_emptiness_is_told_row_by_row(dtype: torch.dtype) -> None:
    out_a, out_b = torch.ones(1, 4, 2, dtype=dtype), torch.full((1, 4, 2), 3.0, dtype=dtype)
    lse_a = torch.tensor([[0.0, EMPTY, 0.0, EMPTY]], dtype=dtype)
    lse_b = torch.tensor([[0.0, 0.0, EMPTY, EMPTY]], dtype=dtype)
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out[0, :, 0].tolist() == pytest.approx([2.0, 3.0, 1.0, 0.0])
    assert lse[0].tolist() == pytest.approx([0.6931471805599453, 0.0, 0.0, EMPTY])


@pytest.mark.parametrize("dtype", MERGE, ids=str)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_parts_do_not_overflow(dtype: torch.dtype, size: float) -> None:
    out_a, out_b = torch.ones(1, 1, 2, dtype=dtype), torch.full((1, 1, 2), 3.0, dtype=dtype)
    lse = torch.full((1, 1), size, dtype=dtype)
    even, _ = merge_attention(out_a, lse, out_b, lse)
    # exp(log 2) is 2 up to the rounding of size + log 2.
    assert even[0, 0].tolist() == pytest.approx([2.0, 2.0], rel=1e-3)
    for merged, _ in (merge_attention(out_a, lse, out_b, -lse), merge_attention(out_b, -lse, out_a, lse)):
        assert merged[0, 0].tolist() == ([1.0, 1.0] if size > 0 else [3.0, 3.0])
