"""What ``gpuops run`` makes of a command line, without starting anything."""

from gpuops.agent.launch.options import read_words
from gpuops.agent.launch.planning import request_of
from gpuops.config.resolve import resolve


def typed_of(words, env=None):
    """Return what *words* say, by torch's own parser: a new one for each parse, as in a process."""
    from torch.distributed.run import get_args_parser

    return read_words([str(word) for word in words], env or {}, get_args_parser())


def requested(*words, env=None, config_file=None, uid=1000):
    """Return the request of *words*, with the environment *env* and nothing else."""
    env = env or {}
    settings = resolve({}, env, config_file=config_file, is_root=False)
    return request_of(typed_of(words, env), settings, env, uid=uid)


def slurm_env(nodes="n[1-4]", n_nodes=4, rank=0, **more):
    """Return what `srun --ntasks-per-node=1` sets, as Slurm 22.05 does."""
    return {
        "SLURM_JOB_ID": "81",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(n_nodes),
        "SLURM_NNODES": str(n_nodes),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(n_nodes),
        "SLURM_STEP_NUM_TASKS": str(n_nodes),
        "SLURM_STEP_TASKS_PER_NODE": "1" if n_nodes == 1 else f"1(x{n_nodes})",
        **more,
    }
