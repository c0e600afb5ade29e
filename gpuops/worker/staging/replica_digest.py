"""Digests of tensors that another rank of the node copies.

On the host it is the xxh3-128 of the bytes, which the keeper computes of the owner's copy as well.
On a device the bytes stay there: two sums over the words of 8 bytes, each scrambled and weighted by
its place (multilinear hashing; D. Lemire and O. Kaser, Computer Journal 57(11), 2014), modulo 2^64.
Integers are added exactly, in any order, so equal bytes have equal digests on all devices; the
owner computes its own in the same way.
"""

from functools import cache
from typing import Any

import torch
import xxhash

_CHUNK_WORDS = 2**22
_WORD_BYTES = 8
_STEP, _FACTOR = -7046029254386353131, -4658895280553007687  # odd, of splitmix64, as signed numbers
_SHIFT = 29


def host_digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor on the host, as its bytes would be in an image."""
    data: Any = _flat_bytes(tensor).numpy()
    return xxhash.xxh3_128_digest(data)


@torch.no_grad()
def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor as 16 bytes on its device; nothing is synchronised."""
    data = _flat_bytes(tensor)
    weights = _weights(data.device)
    found = torch.zeros(2, dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), _CHUNK_WORDS * _WORD_BYTES):
        words = _words(data[begin : begin + _CHUNK_WORDS * _WORD_BYTES])
        # A difference in the highest bit alone would vanish in a pair of words without this.
        scrambled = (words >> _SHIFT).bitwise_xor_(words)
        n = words.numel()
        sums = [(scrambled * weights[at : at + n]).sum() for at in (0, 1)]
        found.mul_(_FACTOR).add_(torch.stack(sums))
    return found.view(torch.uint8)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One item, or none, is contiguous with any stride, and cannot be viewed as bytes with most.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _words(data: torch.Tensor) -> torch.Tensor:
    n_words = -(-data.numel() // _WORD_BYTES)
    if data.numel() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        padded = torch.zeros(n_words * _WORD_BYTES, dtype=torch.uint8, device=data.device)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd weight for each place in a chunk, and one more."""
    weights = torch.arange(1, _CHUNK_WORDS + 2, dtype=torch.int64, device=device).mul_(_STEP)
    weights.bitwise_xor_(weights >> 30).mul_(_FACTOR)
    return weights.bitwise_xor_(weights >> 27).bitwise_or_(1)
