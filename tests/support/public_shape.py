"""The keys of a JSON value, as one line for each."""

WORDS = {bool: "boolean", int: "number", float: "number", str: "text", type(None): "null"}


def shape(*values):
    """Return {path: kinds} of *values*, which have the same form; items of a list share a path."""
    found = {}
    for value in values:
        _add(found, "", value)
    return {path: "|".join(sorted(kinds)) for path, kinds in sorted(found.items())}


def keys(*values):
    """Return the paths alone, where the kinds depend on the machine."""
    return list(shape(*values))


def _add(found, path, value):
    if isinstance(value, dict):
        found.setdefault(path or ".", set()).add("object")
        for key, item in value.items():
            _add(found, f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        found.setdefault(path or ".", set()).add("list")
        for item in value:
            _add(found, f"{path}[]", item)
    else:
        found.setdefault(path, set()).add(WORDS[type(value)])
