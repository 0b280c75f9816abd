import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.oracle import rotation_matrix
from tests.tolerances import ROTATE

from turnkv.kernels import Rotation

DIM = 12
FREQUENCIES = torch.tensor([1.0, 0.37, 0.09, 0.011, 0.002, 0.0004])
ROTATIONS = {
    "half": Rotation(FREQUENCIES, "half", 0),
    "interleaved": Rotation(FREQUENCIES, "interleaved", 0),
    "half, first dims": Rotation(FREQUENCIES[:2], "half", 0),
    "half, last dims": Rotation(FREQUENCIES[:3], "half", 6),
    "interleaved, first dims": Rotation(FREQUENCIES[:4], "interleaved", 0),
    "interleaved, middle dims": Rotation(FREQUENCIES[:2], "interleaved", 5),
}

rotations = pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
distances = st.integers(-1000, 1000)
seeds = st.integers(0, 999)


def vectors(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float64) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=ROTATE[dtype])


@rotations
@pytest.mark.parametrize("dtype", ROTATE, ids=str)
@settings(max_examples=20, deadline=None)
@given(distances, seeds)
def test_vectors_turn_pair_by_pair(rotation: Rotation, dtype: torch.dtype, distance: int, seed: int) -> None:
    given_vectors = vectors(seed, dtype)
    turned = rotation.rotate(given_vectors, distance)
    assert turned.dtype == dtype
    assert torch.equal(given_vectors, vectors(seed, dtype))
    assert_close(turned, given_vectors.double() @ rotation_matrix(rotation, DIM, distance).T, dtype)


@rotations
@settings(max_examples=20, deadline=None)
@given(distances, distances, seeds)
def test_two_turns_are_one_turn_by_their_sum(rotation: Rotation, first: int, second: int, seed: int) -> None:
    twice = rotation.rotate(rotation.rotate(vectors(seed), first), second)
    assert_close(twice, rotation.rotate(vectors(seed), first + second))


@rotations
@settings(max_examples=20, deadline=None)
@given(distances, seeds)
def test_turning_back_restores_and_keeps_the_length(rotation: Rotation, distance: int, seed: int) -> None:
    turned = rotation.rotate(vectors(seed), distance)
    assert_close(rotation.rotate(turned, -distance), vectors(seed))
    assert_close(turned.norm(dim=-1), vectors(seed).norm(dim=-1))


@rotations
@settings(max_examples=20, deadline=None)
@given(distances, seeds)
def test_turning_the_query_back_scores_as_turning_the_key(rotation: Rotation, distance: int, seed: int) -> None:
    query, key = vectors(seed), vectors(seed + 1000)
    moved_key = key @ rotation_matrix(rotation, DIM, distance).T
    assert_close((rotation.rotate(query, -distance) * key).sum(-1), (query * moved_key).sum(-1))


@rotations
def test_no_distance_returns_the_vectors_themselves(rotation: Rotation) -> None:
    given_vectors = vectors(0, torch.bfloat16)
    assert rotation.rotate(given_vectors, 0) is given_vectors


def test_dims_outside_the_rotation_are_left_bit_for_bit() -> None:
    rotation = ROTATIONS["interleaved, middle dims"]
    turned = rotation.rotate(vectors(3, torch.bfloat16), 77)
    is_rotated = torch.zeros(DIM, dtype=torch.bool)
    is_rotated[5:9] = True
    assert torch.equal(turned[..., ~is_rotated], vectors(3, torch.bfloat16)[..., ~is_rotated])
    assert not torch.isclose(turned[..., is_rotated], vectors(3, torch.bfloat16)[..., is_rotated]).all()


def test_one_rotation_serves_several_precisions_in_turn() -> None:
    rotation = Rotation(FREQUENCIES, "half", 0)
    single = rotation.rotate(vectors(1, torch.float32), 999)
    double = rotation.rotate(vectors(1), 999)
    assert_close(double, vectors(1) @ rotation_matrix(rotation, DIM, 999).T)
    assert torch.equal(rotation.rotate(vectors(1, torch.float32), 999), single)


def test_the_cache_of_angles_stays_bounded() -> None:
    rotation = Rotation(FREQUENCIES[:1], "half", 0)
    for distance in range(1, 5000):
        rotation.rotate(torch.ones(2), distance)
    assert len(rotation._angles) <= 4097
