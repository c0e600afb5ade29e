"""Training state that outlives its processes: in memory on nodes, on disk, verified, agreed on.

Nothing here imports torch: the keeper of a node's copies and the commands for an operator run
without it. What is torch's, taking a state out of a job and putting it back, is in
`gpuops.worker.checkpointer`.
"""
