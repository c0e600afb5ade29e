"""Checkpoints for call sites of ``torch.distributed.checkpoint``: one argument, nothing else.

``dcp.save(state, storage_writer=GpuopsWriter("/shared/ckpt", step=n))`` and
``dcp.load(state, storage_reader=GpuopsReader("/shared/ckpt"))`` keep states as
`gpuops.Checkpointer` does: a state appears whole or not at all, every byte is verified when it is
read, and ``gpuops ckpt`` lists, verifies, prunes and converts them.
``dcp.async_save(state, storage_writer=…, async_stager=stager)`` with one ``GpuopsStager()`` for the
whole job copies into memory that is there already.
"""

from gpuops.worker.adapters.dcp_reader import GpuopsReader
from gpuops.worker.adapters.dcp_stager import GpuopsStager
from gpuops.worker.adapters.dcp_writer import GpuopsWriter

__all__ = ["GpuopsReader", "GpuopsStager", "GpuopsWriter"]
