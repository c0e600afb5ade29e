"""Other bytes with the same xxh3-64: what somebody between two keepers can put in a chunk's place.

The hash of more than 240 bytes adds up, for each of eight lanes of a block of 1,024 bytes, the
words of the lane, and the products of their halves after an XOR with public constants. Both sums
of the first lane are kept here: ten of its words are free, six make good for them.
"""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
_KEYS = [int.from_bytes(_SECRET[8 * n : 8 * n + 8], "little") for n in range(16)]
_WORD, _HALF = 2**64, 2**32
_FREE = range(10)
POISON = 0xDEADBEEFDEADBEEF


def forged(data):
    """Return *data* with other words of ours at its beginning, and the same xxh3-64."""
    data = bytearray(data)
    words = [int.from_bytes(data[64 * n : 64 * n + 8], "little") for n in range(16)]
    total, products = sum(words), sum(_product(n, word) for n, word in enumerate(words))
    for n in _FREE:
        words[n] = POISON
    missing = (products - sum(_product(n, words[n]) for n in _FREE)) % _WORD
    words[11] = _keyed(11, 1, missing % _HALF)
    left = missing // _HALF
    for n in (12, 13, 15):  # each up to 2**31 - 1 of the upper half
        part = min(left, 2**31 - 1)
        words[n], left = _keyed(n, 2**31, 2 * part), left - part
    # A half of zeros makes no product, so that the other one is free to mend the total.
    words[10], words[14] = _keyed(10, 0, 0) % _HALF, _keyed(14, 0, 0) // _HALF * _HALF
    missing = (total - sum(words)) % _WORD
    words[14] += missing % _HALF
    words[10] += missing // _HALF * _HALF
    for n, word in enumerate(words):
        data[64 * n : 64 * n + 8] = word.to_bytes(8, "little")
    return bytes(data)


def _product(n, word):
    low, high = (word ^ _KEYS[n]) % _HALF, (word ^ _KEYS[n]) // _HALF
    return low * high


def _keyed(n, low, high):
    """Return the word whose halves are *low* and *high* after the XOR."""
    return (high * _HALF + low) ^ _KEYS[n]
