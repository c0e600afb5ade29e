"""Values of a state on their way into metadata and tensors."""

import torch

from gpuops.convert.tensors import needs_carrier
from gpuops.convert.values import ValueEncoder

# Of the metadata that a state is described by.
STATE_FORMAT = 1


class StateEncoder:
    """Takes the tensors out of values on their way to JSON."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.encoder = ValueEncoder(self.put, allow_pickle=allow_pickle)
        self._n_by_path: dict[str, int] = {}
        self._used: set[str] = set()

    def put(self, tensor: torch.Tensor, path: str) -> object:
        """Keep *tensor*, whose name is its path; return what stands for it in the JSON.

        Keys such as 1 and "1", or ("a", 1) and ("a", 2), lead to one path: then it is numbered.
        """
        name, number = path, self._n_by_path.get(path, 1)
        while name in self._used:
            number += 1
            name = f"{path}#{number}"
        self._n_by_path[path] = number
        self._used.add(name)
        self.names.append(name)
        self.tensors.append(tensor)
        dtype = tensor.dtype
        return [name, str(dtype).removeprefix("torch.")] if needs_carrier(dtype) else name
