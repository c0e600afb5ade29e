"""Checkpoints for ``torch.distributed.checkpoint``: one more argument.

``dcp.save(state, storage_writer=GpuopsWriter("/shared/ckpt", step=n))`` and
``dcp.load(state, storage_reader=GpuopsReader("/shared/ckpt"))`` store states like
`gpuops.Checkpointer`: a state appears atomically, every byte is verified when it is read, and
``gpuops ckpt`` lists, verifies, prunes and converts them.
``dcp.async_save(state, storage_writer=…, async_stager=stager)`` with one ``GpuopsStager()`` for the
whole job copies into memory that is allocated once.
"""

from gpuops.worker.adapters.dcp_reader import GpuopsReader
from gpuops.worker.adapters.dcp_stager import GpuopsStager
from gpuops.worker.adapters.dcp_writer import GpuopsWriter

__all__ = ["GpuopsReader", "GpuopsStager", "GpuopsWriter"]
