"""Have torch let go of workers that no signal ends, as of those that sit in the kernel (state D).

torch waits a minute for such a process when it closes a generation, before 2.13 for ever; until
then nobody would hear of it. Its logs are followed no further.
"""

from collections.abc import Iterable
from signal import SIGKILL

from torch.distributed.elastic.multiprocessing.api import PContext


def leave_behind(context: PContext, local_ranks: Iterable[int]) -> None:
    """Close *context*, whose other workers have ended, without waiting for *local_ranks*."""
    handlers = getattr(context, "subprocess_handlers", {})
    for local_rank in local_ranks:
        handlers.pop(local_rank, None)
    context.close(SIGKILL)
