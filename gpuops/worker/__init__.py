"""The code inside a training process. `api` and `checkpointer` are public.

* `shim`: started by ``gpuops run`` in place of the user's script: heartbeats, failure file.
* `heartbeat`, `optimizer_hook`: one beat per optimizer step, without changes to the script.
* `checkpointer.Checkpointer`: three lines in a script. A save goes `schedule` -> `staging` (tensors
  and everything else at one moment) -> `saver` (acquire a buffer, copy, commit). A load goes
  `keeper_finder` -> `restore` -> `state.saved_state`.
* `state`: one adapter for each kind of part: model, optimizer, RNG, objects.
* `final_save`, `preemption`: the state after the last step; SIGTERM as a flag.
* `adapters`: DCP, Hugging Face, Lightning. `bench`: ``gpuops ckpt bench``.

A failure here is logged once, and training continues.
"""
