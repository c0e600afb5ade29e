"""What the tensors of a module are called in a checkpoint: the same with and without wrappers.

DistributedDataParallel, torch.compile and activation checkpointing put names of their own into
the path of a parameter; a state that is saved under one of them loads without it, and vice versa.
"""

from collections.abc import Iterable, Mapping

from torch import nn

_ALWAYS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def canonical_names(module: nn.Module, keys: Iterable[str]) -> tuple[str, ...]:
    """Return what each of *keys*, those of the module's state dict, is called without wrappers."""
    clean = _clean_prefixes(module)
    return tuple(_canonical(key, clean) for key in keys)


def _canonical(key: str, clean: Mapping[str, str]) -> str:
    head, _, last = key.rpartition(".")
    prefix = clean.get(head)
    if prefix is None:  # a key of the module's own making
        prefix = "".join(f"{word}." for word in head.split(".") if word and word not in _ALWAYS)
    return prefix + last


def _clean_prefixes(module: nn.Module) -> dict[str, str]:
    """Return for the path of each module how the names of what it holds begin."""
    clean = {"": ""}
    modules = dict(module.named_modules(remove_duplicate=False))
    for path in modules:
        if not path:
            continue
        parent, _, name = path.rpartition(".")
        is_wrapped = name in _ALWAYS or (
            name == "module" and isinstance(modules.get(parent), _WRAPPERS)
        )
        begin = clean.get(parent, "")
        clean[path] = begin if is_wrapped else f"{begin}{name}."
    return clean
