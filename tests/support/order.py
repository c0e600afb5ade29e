"""The order of tests over several processes: what waits long begins everywhere at once."""

from collections import defaultdict

SLOW = ("tests/faults/", "tests/integration/", "tests/packaging/")
SHARED = ("tests/integration/slurm/",)  # one process has the cluster that these start


def group_of(path):
    """Return what of *path* runs in one process, None for a quick test.

    ``tests/integration/slurm/test_prolog.py`` gives ``tests/integration/slurm/``.
    """
    if not path.startswith(SLOW):
        return None
    return next((folder for folder in SHARED if path.startswith(folder)), path)


def spread(paths, n_workers):
    """Return the indices of *paths* in an order of which *n_workers* equal parts begin slowly.

    xdist's ``worksteal`` gives each worker one part, and takes from the end of a part for who is
    done. In alphabetical order two of the parts had all slow tests, and the rest waited for them.
    """
    groups, quick = defaultdict(list), []
    for index, path in enumerate(paths):
        group = group_of(path)
        (quick if group is None else groups[group]).append(index)
    heads = [[] for _ in range(n_workers)]
    for group in sorted(groups, key=lambda name: (name not in SHARED, -len(groups[name]), name)):
        min(heads, key=len).extend(groups[group])
    ordered, left = [], list(reversed(quick))
    for n_after, head in zip(reversed(range(n_workers)), heads, strict=True):
        size = (len(paths) - len(ordered)) // (n_after + 1)
        n_quick = max(0, min(len(left), size - len(head)))
        ordered += head + [left.pop() for _ in range(n_quick)]
    return ordered + list(reversed(left))
